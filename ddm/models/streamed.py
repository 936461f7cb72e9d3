"""Evaluates an expert that is larger than memory: each linear layer reads its weights from disk when called, in parts.

All other weights are loaded: very few of a transformer's, nearly all of a U-Net's; `resident_bytes` counts them. It is
slower than a loaded expert wherever samples need several batches, and meant for a few dozen images.
"""

# Shape legend: B batch, I inputs, O outputs of a layer, ... all data dimensions.
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import TensorFileError
from ddm.io.tensors import check_tensors, read_header
from ddm.models import empty_expert, expected_tensors
from ddm.protocol.architecture import Architecture, Condition, NoCondition

PART_BYTES = 32 << 20
_FLOAT_BYTES = 4
_LIVE = 12  # intermediate results of about the widest layer's size that are alive at once
_ACTIVATION_BYTES = 256 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One float32 tensor in a verified file that does not change.

    Attributes:
        path: the file.
        offset: of its first byte.
        shape: its shape.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive rows and their indices, some at a time; the entries of a vector are its rows."""
        num_rows, width = self.shape[0], prod(self.shape[1:])
        step = max(1, PART_BYTES // (_FLOAT_BYTES * width))
        with self.path.open("rb") as handle:
            for start in range(0, num_rows, step):
                rows = slice(start, min(start + step, num_rows))
                size = (rows.stop - start) * width * _FLOAT_BYTES
                data = bytearray(
                    os.pread(handle.fileno(), size, self.offset + start * width * _FLOAT_BYTES)
                )
                if len(data) != size:
                    expected, got = f"{size} bytes, as its header says", f"{len(data)} bytes"
                    raise TensorFileError(self.path.name, expected=expected, got=got)
                yield rows, torch.frombuffer(data, dtype=torch.float32).view(-1, *self.shape[1:])

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return torch.cat([part for _, part in self.parts()]).view(self.shape)

    def root_mean_square(self) -> float:
        """Return ``sqrt(mean(w^2))``."""
        total = sum(float(part.square().sum(dtype=torch.float64)) for _, part in self.parts())
        return math.sqrt(total / prod(self.shape))


def stored_tensors(
    architecture: Architecture,
    shape: Sequence[int],
    path: Path,
    max_bytes: int,
    condition: Condition = NoCondition(),
) -> dict[str, StoredTensor]:
    """Find an expert's tensors in its file by name, without reading any.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W), or volume, (C, D, H, W).
        path: the file.
        max_bytes: most bytes it may have.
        condition: the kind of condition that the expert takes.

    Raises:
        TensorFileError: it holds other tensors than the architecture implies.
    """
    found = read_header(path, max_bytes=max_bytes)
    check_tensors(found, expected_tensors(architecture, shape, condition), path.name)
    offset = path.stat().st_size - sum(spec.bytes for spec in found.values())
    stored = {}
    for name, spec in found.items():  # in the order of their bytes, side by side
        stored[name] = StoredTensor(path, offset, spec.shape)
        offset += spec.bytes
    return stored


class StreamedLinear(nn.Module):
    """A linear layer whose weights stay in a file."""

    def __init__(self, weight: StoredTensor, bias: StoredTensor | None) -> None:
        super().__init__()
        self.weight_OI, self.bias_O = weight, bias

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return ``x W^T + b``."""
        bias_O = self.bias_O.load() if self.bias_O else None
        out = x_BI.new_empty((*x_BI.shape[:-1], self.weight_OI.shape[0]))
        for rows, weight_OI in self.weight_OI.parts():
            out[..., rows] = F.linear(x_BI, weight_OI, bias_O[rows] if bias_O is not None else None)
        return out


class StreamedExpert:
    """An expert on disk with the outputs of a loaded one, in memory that does not grow with its linear layers.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W), or volume, (C, D, H, W).
        stored: its tensors.
        condition: the kind of condition that the expert takes.

    Attributes:
        resident_bytes: bytes of the weights that stay in memory.
    """

    def __init__(
        self,
        architecture: Architecture,
        shape: Sequence[int],
        stored: Mapping[str, StoredTensor],
        condition: Condition = NoCondition(),
    ) -> None:
        model = empty_expert(architecture, shape, condition)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                owner, _, last = name.rpartition(".")
                streamed = StreamedLinear(stored[f"{name}.weight"], stored.get(f"{name}.bias"))
                setattr(model.get_submodule(owner), last, streamed)
        resident = {name: stored[name].load() for name in model.state_dict()}
        model.load_state_dict(resident, strict=True, assign=True)
        self.resident_bytes = sum(tensor.nbytes for tensor in resident.values())
        self.model = model.eval()
        self._batch = max(1, _ACTIVATION_BYTES // (_LIVE * _FLOAT_BYTES * model.widest))

    @torch.no_grad()
    def __call__(self, x_B: Tensor, t_B: Tensor, c_B: Tensor | None = None) -> Tensor:
        """Return the expert's prediction, shape (B, ...); without `c_B`, under the null condition."""
        inputs = (x_B, t_B) if c_B is None else (x_B, t_B, c_B)
        batches = zip(*(torch.split(each, self._batch) for each in inputs), strict=True)
        return torch.cat([self.model(*batch) for batch in batches])
