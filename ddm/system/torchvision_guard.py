"""Lets torchvision be imported beside a torch whose build its compiled operators do not fit.

No package index has a torchvision for a torch without CUDA. The one that there is cannot load its operators there, and
its import fails with `operator torchvision::nms does not exist`; so does that of timm, diffusers, transformers and
accelerate, which import it. They need only its Python parts, for which the schemas of two operators suffice.

`import ddm` installs the guard for everything that is imported afterwards. It costs nothing until torchvision is
imported, and changes nothing where torchvision's own import succeeds. `ddm.system.torchvision_startup` installs it for
every program of an environment.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.library import Library

_TORCHVISION = "torchvision"
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# A schema exists as long as its library.
_libraries: list["Library"] = []


class TorchvisionGuard:
    """Finds torchvision as Python would, and gives it a loader that can do without its compiled operators."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of torchvision; None for every other module."""
        if name != _TORCHVISION:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _TolerantLoader(spec.loader.name, spec.loader.path)
        return spec


class _TolerantLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Execute torchvision; where its operators are missing, define their schemas and execute it again."""
        try:
            super().exec_module(module)
        except RuntimeError:
            # Only after a failure: where the import succeeds, it defines them itself, and torch allows one definition.
            if not _define_missing_schemas():
                raise
            super().exec_module(module)


def _define_missing_schemas() -> bool:
    """Define the schemas that torchvision's import asks for; return False where torch has them already."""
    import torch  # torchvision has imported it by now

    if hasattr(torch.ops.torchvision, "nms"):
        return False
    library = torch.library.Library(_TORCHVISION, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}{_NMS}")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return True


def install_guard() -> None:
    """Install the guard in this process, once."""
    if not any(isinstance(finder, TorchvisionGuard) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionGuard())
