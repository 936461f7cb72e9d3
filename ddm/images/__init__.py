"""Images from a path to training samples: find, decode, check, transform, store, and read by rows."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddm.images.read import read_pictures
    from ddm.images.reasons import Flag, ImageError, Reason

__all__ = ["Flag", "ImageError", "Reason", "read_pictures"]

_HOMES = {
    "Flag": "ddm.images.reasons",
    "ImageError": "ddm.images.reasons",
    "Reason": "ddm.images.reasons",
    "read_pictures": "ddm.images.read",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use: every decoder process imports this package, and must start fast."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ddm.images' has no attribute {name!r}")
