"""How does one look at an expert that is larger than memory? Each layer reads its weights when it is called, in parts.

Slower than a loaded expert wherever an answer needs several batches, and meant for a few dozen images.
"""

# Shape legend: B batch, I inputs, O outputs of a layer.
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import ShapeError, TensorFileError
from ddm.models import expected_tensors
from ddm.models.dit import DiT
from ddm.protocol.plan import Dit
from ddm.tensors import check_tensors, read_header

PART_BYTES = 32 << 20
_FLOAT_BYTES = 4
_LIVE = 12  # intermediate results of about the widest layer's size that are alive at once
_ACTIVATION_BYTES = 256 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One float32 tensor in a verified file that nobody changes.

    Attributes:
        path: the file.
        offset: of its first byte.
        shape: its shape.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the tensor by rows, some at a time, with their numbers; a vector's entries are its rows."""
        num_rows, width = self.shape[0], prod(self.shape[1:])
        step = max(1, PART_BYTES // (_FLOAT_BYTES * width))
        with self.path.open("rb") as handle:
            for start in range(0, num_rows, step):
                rows = slice(start, min(start + step, num_rows))
                size = (rows.stop - start) * width * _FLOAT_BYTES
                data = bytearray(os.pread(handle.fileno(), size, self.offset + start * width * _FLOAT_BYTES))
                if len(data) != size:
                    raise TensorFileError(self.path.name, expected="the bytes that its header tells", got="fewer")
                yield rows, torch.frombuffer(data, dtype=torch.float32).view(-1, *self.shape[1:])

    def root_mean_square(self) -> float:
        """Return ``sqrt(mean(w^2))``."""
        total = sum(float(part.square().sum(dtype=torch.float64)) for _, part in self.parts())
        return math.sqrt(total / prod(self.shape))


def stored_tensors(architecture: Dit, shape: Sequence[int], path: Path, max_bytes: int) -> dict[str, StoredTensor]:
    """Find an expert's tensors in its file by name, without reading any.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W).
        path: the file.
        max_bytes: most bytes it may have.

    Raises:
        TensorFileError: it holds other tensors than the architecture implies.
    """
    found = read_header(path, max_bytes=max_bytes)
    check_tensors(found, expected_tensors(architecture, shape), path.name)
    offset = path.stat().st_size - sum(spec.bytes for spec in found.values())
    stored = {}
    for name, spec in found.items():  # in the order of their bytes, side by side
        stored[name] = StoredTensor(path, offset, spec.shape)
        offset += spec.bytes
    return stored


class StreamedLinear(nn.Module):
    """A linear layer whose weights stay in a file."""

    def __init__(self, weight: StoredTensor, bias: StoredTensor) -> None:
        super().__init__()
        self.weight_OI, self.bias_O = weight, bias

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return ``x W^T + b``."""
        bias_O = torch.cat([part for _, part in self.bias_O.parts()])
        out = x_BI.new_empty((*x_BI.shape[:-1], len(bias_O)))
        for rows, weight_OI in self.weight_OI.parts():
            out[..., rows] = F.linear(x_BI, weight_OI, bias_O[rows])
        return out


class StreamedExpert:
    """An expert on disk that answers as a loaded one does, in memory that does not grow with it.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W).
        stored: its tensors.
    """

    def __init__(self, architecture: Dit, shape: Sequence[int], stored: Mapping[str, StoredTensor]) -> None:
        size = (shape[0], shape[1], shape[2])
        arguments = (architecture.patch, architecture.hidden)
        with torch.device("meta"):
            model = DiT(size, *arguments, architecture.depth, architecture.heads)
        # What is computed and not stored does not depend on the depth.
        for name, value in DiT(size, *arguments, 0, architecture.heads).named_buffers():
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_buffer(last, value, persistent=False)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                owner, _, last = name.rpartition(".")
                streamed = StreamedLinear(stored[f"{name}.weight"], stored[f"{name}.bias"])
                setattr(model.get_submodule(owner), last, streamed)
        if any(True for _ in model.parameters()):
            raise ShapeError("expert", expected="weights of linear layers only", got="others")
        self.model = model.eval()
        tokens = prod(shape[1:]) // architecture.patch**2
        widest = max(sum(model.widths), 4 * architecture.hidden * tokens)
        self._batch = max(1, _ACTIVATION_BYTES // (_LIVE * _FLOAT_BYTES * widest))

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return what the expert answers, shape (B, C, H, W)."""
        batches = zip(torch.split(x_BCHW, self._batch), torch.split(t_B, self._batch), strict=True)
        return torch.cat([self.model(x, t) for x, t in batches])
