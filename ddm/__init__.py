"""Decentralized diffusion models: shared mathematics, documents, trust, and the researcher's library."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddm.ensemble import Ensemble
    from ddm.student import load_student

__all__ = ["Ensemble", "load_student"]


def __getattr__(name: str) -> Any:
    """Load what needs torch on first use, so that `import ddm` pulls in none."""
    if name == "Ensemble":
        from ddm.ensemble import Ensemble

        return Ensemble
    if name == "load_student":
        from ddm.student import load_student

        return load_student
    raise AttributeError(f"module 'ddm' has no attribute {name!r}")
