"""Which torch is installed, and which GPUs of this machine it can compute on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")
# An architecture that torch was compiled for, such as sm_90, or compute_90, which newer GPUs can translate.
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")


@dataclass(frozen=True)
class TorchBuild:
    """A torch, and what it can compute on.

    Attributes:
        version: its version, such as 2.13.0+cpu.
        cuda: the version of CUDA that it was built with; None for a build for CPUs alone.
        num_gpus: the number of gpus that it sees.
        unsupported_gpus: those of them that it was not compiled for, by name.
    """

    version: str
    cuda: str | None
    num_gpus: int = 0
    unsupported_gpus: tuple[str, ...] = ()


def has_nvidia_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is at work on this machine."""
    return _DRIVER.exists()


def read_torch_build() -> TorchBuild | None:
    """Return the torch of this environment; None where it cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    num_gpus = 0
    unsupported = []
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        architectures = torch.cuda.get_arch_list()
        for number in range(num_gpus):
            if not is_compiled_for(torch.cuda.get_device_capability(number), architectures):
                unsupported.append(torch.cuda.get_device_name(number))
    return TorchBuild(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        num_gpus=num_gpus,
        unsupported_gpus=tuple(unsupported),
    )


def is_compiled_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for one of these architectures runs on a GPU of this compute capability.

    Compiled code (`sm_`) runs on GPUs of the same major and at least the same minor version, code with a letter on
    exactly one version, and code to translate (`compute_`) on that version and all later ones.

    Source:
        NVIDIA, CUDA C++ Programming Guide, sections Binary Compatibility and PTX Compatibility.
    """
    for architecture in architectures:
        match = _ARCHITECTURE.fullmatch(architecture)
        if match is None:
            continue
        kind, major_digits, minor_digit, letter = match.groups()
        compiled = (int(major_digits), int(minor_digit))
        if letter:
            is_fit = capability == compiled
        elif kind == "compute":
            is_fit = capability >= compiled
        else:
            is_fit = capability[0] == compiled[0] and capability[1] >= compiled[1]
        if is_fit:
            return True
    return False
