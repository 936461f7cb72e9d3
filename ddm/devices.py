"""Where does torch compute? On the GPU, where there is one and nobody says otherwise."""

import torch

from ddm.engine import DeviceName
from ddm.errors import SetupError


def device_named(name: DeviceName = "auto", *, setting: str = "device") -> torch.device:
    """Return a device by its name.

    Args:
        name: auto is the GPU where there is one.
        setting: what to call it in an error.

    Raises:
        SetupError: a GPU is asked for, and there is none.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise SetupError(setting, expected="a GPU that torch sees", got="none", remedy="Set it to auto or cpu.")
    return torch.device("cuda" if found and name != "cpu" else "cpu")
