"""Installs the guard of torchvision for every program of an environment, `accelerate` among them, where it is needed.

`make setup` runs `python -m ddm.system.torchvision_startup`.
"""

import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

# Python reads such a file of an environment whenever it starts, and executes its lines (the module `site`).
STARTUP_FILE = "archipelago_torchvision.pth"
# pip leaves the file behind when it removes Archipelago, and no program may complain about that.
_LINE = (
    'import importlib.util; importlib.util.find_spec("ddm") and importlib.import_module("ddm")\n'
)


def operators_fit() -> bool:
    """Whether torchvision's compiled operators load beside the torch of this environment."""
    import torch

    spec = PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for library in Path(spec.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            return False
    return True


def install_startup_file(folder: Path, *, fits: bool) -> bool:
    """Write the file that installs the guard in every program of an environment; remove it where nothing needs it.

    Args:
        folder: the environment's site-packages.
        fits: whether torchvision fits torch.

    Returns:
        Whether the file is there.
    """
    path = folder / STARTUP_FILE
    if fits:
        path.unlink(missing_ok=True)
        return False
    path.write_text(_LINE, "utf-8")
    return True


if __name__ == "__main__":
    is_installed = install_startup_file(Path(sysconfig.get_path("purelib")), fits=operators_fit())
    if is_installed:
        print("torchvision's compiled operators do not fit this torch: imports go without them.")
