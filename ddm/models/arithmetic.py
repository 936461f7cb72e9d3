"""The arithmetic of an expert that is sampled: the precision of its matrix products, and whether torch compiles it.

In bfloat16 and float16 the weights of linear layers and convolutions are kept in that dtype, at half the memory, and
the network runs under `torch.autocast`: its products are in that dtype, while times, norms and softmax stay in float32.
The answers are to the byte those of autocast over float32 weights, which would convert all of them at every call.
"""

# Shape legend: B batch, ... all data dimensions.
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ddm.errors import SetupError
from ddm.system.compiling import use_own_compiler_folder

DtypeName = Literal["float32", "tf32", "bfloat16", "float16"]

_LOWER = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Arithmetic:
    """How experts compute while they are sampled.

    Args:
        dtype: the dtype of matrix products: float32; tf32, float32 whose products a GPU rounds to 10 bits of mantissa;
            bfloat16, with 7 bits; or float16, with 10 bits and a range that ends at 65,504, on a GPU only.
        compile: let torch compile the networks: up to minutes before the first step, then faster ones.
    """

    dtype: DtypeName = "float32"
    compile: bool = False

    def check(self, device: torch.device) -> None:
        """Refuse what the device does not have.

        Raises:
            SetupError: tf32 or float16 without a GPU, or bfloat16 on a GPU that has none.
        """
        if self.dtype in ("tf32", "float16") and device.type != "cuda":
            raise SetupError(
                f"dtype {self.dtype}",
                expected="a GPU",
                got=f"the device {device.type}",
                remedy="Use float32 or bfloat16, or a GPU.",
            )
        on_gpu = device.type == "cuda"
        if self.dtype == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported():
            raise SetupError(
                "dtype bfloat16",
                expected="a GPU with bfloat16",
                got=torch.cuda.get_device_name(device),
                remedy="Use float16.",
            )

    def configure_torch(self) -> None:
        """Set what torch keeps for the whole process: whether products of float32 may be rounded to TF32."""
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.dtype == "tf32"

    def prepare(self, network: nn.Module) -> Callable[..., Tensor]:
        """Return a network as it is sampled; its weights are converted in place."""
        # Norms and embeddings stay in float32, as autocast computes them.
        lower = _LOWER.get(self.dtype)
        if lower is not None:
            for module in network.modules():
                if isinstance(module, _PRODUCTS):
                    module.to(lower)
        call: Callable[..., Tensor] = network
        if self.compile:
            use_own_compiler_folder()
            call = torch.compile(network, dynamic=True)
        if lower is not None:
            call = _AutocastNetwork(call, lower)
        return call


@dataclass(frozen=True)
class _AutocastNetwork:
    """A network under autocast, which answers in the dtype of its input."""

    network: Callable[..., Tensor]
    dtype: torch.dtype

    def __call__(
        self,
        x_B: Tensor,
        t_B: Tensor,
        *condition_B: Tensor,
    ) -> Tensor:
        with torch.autocast(x_B.device.type, self.dtype):
            return self.network(x_B, t_B, *condition_B).to(x_B.dtype)


def why_not_compiled(device: torch.device) -> str | None:
    """Return in a few words why torch cannot compile for a device here; None where it can.

    A small network is compiled to see.
    """
    use_own_compiler_folder()
    small = nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(device)
    try:
        with torch.inference_mode():
            torch.compile(small)(torch.zeros(2, 4, device=device))
    # Torch raises many kinds of error, its own and those of the compilers that it calls.
    except Exception as error:
        lines = str(error).strip().splitlines()
        if lines:
            reason = lines[0]
        else:
            reason = type(error).__name__
        return reason[:200]
    return None
