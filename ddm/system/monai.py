"""MONAI's networks, imported without the packages that importing MONAI reaches and its networks never call."""

import sys
import warnings
from importlib import import_module
from types import ModuleType

from ddm.errors import SetupError

# MONAI tries these and continues where they are missing. They are two thirds of the seconds that its import takes.
_UNNEEDED = ("transformers", "jsonschema")


def monai_networks(where: str) -> ModuleType:
    """Return monai.networks.nets.

    Args:
        where: the subject of the error.

    Raises:
        SetupError: MONAI is not installed.
    """
    absent = [name for name in _UNNEEDED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type] # None: as if it were not installed
    try:
        with warnings.catch_warnings():
            # From third-party imports.
            warnings.simplefilter("ignore")
            return import_module("monai.networks.nets")
    except ImportError as error:
        raise SetupError(
            where,
            expected="an installed MONAI",
            got="no module monai",
            remedy="Install it: pip install 'monai[einops,nibabel]>=1.4'.",
        ) from error
    finally:
        for name in absent:
            del sys.modules[name]
