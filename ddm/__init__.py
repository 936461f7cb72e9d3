"""Decentralized diffusion models: shared mathematics, documents, trust, and the researcher's library."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddm.ensemble import Ensemble

__all__ = ["Ensemble"]


def __getattr__(name: str) -> Any:
    """Load `Ensemble` on first use, so that `import ddm` pulls in no torch."""
    if name == "Ensemble":
        from ddm.ensemble import Ensemble

        return Ensemble
    raise AttributeError(f"module 'ddm' has no attribute {name!r}")
