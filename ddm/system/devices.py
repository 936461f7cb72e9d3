"""The device that torch computes on: the GPU, where there is one and nobody says otherwise."""

from typing import TYPE_CHECKING, Literal

from ddm.errors import SetupError

if TYPE_CHECKING:
    import torch

DeviceName = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]


def device_named(name: DeviceName = "auto", *, setting: str = "device") -> "torch.device":
    """Return a device by its name.

    Args:
        name: auto is the GPU where there is one.
        setting: what to call it in an error.

    Raises:
        SetupError: a GPU is asked for, and torch sees none.
    """
    # Here, so that settings with a `DeviceName` are read without it.
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise SetupError(
            setting, expected="a GPU that torch sees", got="no GPU", remedy="Set it to auto or cpu."
        )
    if has_gpu and name != "cpu":
        return torch.device("cuda")
    return torch.device("cpu")


def computes_in_bf16(precision: Precision, device: "torch.device") -> bool:
    """Whether a recipe's precision means bfloat16 on this device: auto means it where products in it are faster.

    Against float32, Intel's AVX-512 multiplies bfloat16 at half the rate, AMD's at twice it, Intel's tiles (AMX) at
    many times. See docs/results/benchmarks.md.

    Args:
        precision: the recipe's.
        device: where the recipe is followed.
    """
    import torch

    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        # Older GPUs emulate bfloat16, which is slower than float32.
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16") or (has.get("avx512_bf16") and processor_by_amd()))


def processor_by_amd() -> bool:
    """Whether this machine's processor is known to be one of AMD's."""
    import torch

    return str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("AMD")
