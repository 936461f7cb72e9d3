"""Decentralized diffusion models: shared mathematics, documents, trust, and the researcher's library."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddm.system.torchvision_guard import install_guard

if TYPE_CHECKING:
    from ddm.distillation.student import load_student
    from ddm.encoders.text import TextEncoder
    from ddm.ensemble import Ensemble
    from ddm.loading.ensemble import open_ensemble
    from ddm.sampling.options import SamplingOptions

__all__ = ["Ensemble", "SamplingOptions", "TextEncoder", "load_student", "open_ensemble"]

_HOMES = {
    "Ensemble": "ddm.ensemble",
    "SamplingOptions": "ddm.sampling.options",
    "TextEncoder": "ddm.encoders.text",
    "load_student": "ddm.distillation.student",
    "open_ensemble": "ddm.loading.ensemble",
}

# For a user's own imports as well: `import timm` after `import ddm` works beside every build of torch.
install_guard()


def __getattr__(name: str) -> Any:
    """Load what needs torch on first use, so that `import ddm` pulls in none."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ddm' has no attribute {name!r}")
