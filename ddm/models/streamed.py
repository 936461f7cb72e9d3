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
from ddm.models.network import FLOAT_BYTES
from ddm.protocol.architecture import Architecture, Condition, NoCondition

PART_BYTES = 32 << 20
# Intermediate results of about the size of the widest output that exist at once, and the most bytes of all of them.
_NUM_INTERMEDIATE = 12
_ACTIVATION_BYTES = 256 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One float32 tensor in a verified file that does not change.

    Attributes:
        path: the file.
        offset: the offset of its first byte.
        shape: its shape.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive rows and their indices, some at a time; the entries of a vector are its rows."""
        num_rows = self.shape[0]
        row_bytes = FLOAT_BYTES * prod(self.shape[1:])
        rows_per_part = max(1, PART_BYTES // row_bytes)
        with self.path.open("rb") as handle:
            for start in range(0, num_rows, rows_per_part):
                end = min(start + rows_per_part, num_rows)
                num_bytes = (end - start) * row_bytes
                place = self.offset + start * row_bytes
                content = os.pread(handle.fileno(), num_bytes, place)
                # A bytearray, since torch warns of memory that is read-only.
                data = bytearray(content)
                if len(data) != num_bytes:
                    raise TensorFileError(
                        self.path.name,
                        expected=f"{num_bytes} bytes, as its header says",
                        got=f"{len(data)} bytes",
                    )
                values = torch.frombuffer(data, dtype=torch.float32)
                yield slice(start, end), values.view(-1, *self.shape[1:])

    def load(self) -> Tensor:
        """Return the whole tensor."""
        parts = [part for _, part in self.parts()]
        joined = torch.cat(parts)
        return joined.view(self.shape)

    def root_mean_square(self) -> float:
        """Return ``sqrt(mean(w^2))``."""
        sum_of_squares = 0.0
        for _, part in self.parts():
            sum_of_part = part.square().sum(dtype=torch.float64)
            sum_of_squares += float(sum_of_part)
        num_values = prod(self.shape)
        return math.sqrt(sum_of_squares / num_values)

    def distance(self, other: "StoredTensor") -> float:
        """Return ``sqrt(mean((w - v)^2))`` from a tensor of the same shape."""
        sum_of_squares = 0.0
        for (_, part), (_, other_part) in zip(self.parts(), other.parts(), strict=True):
            squares = (part - other_part).square()
            sum_of_part = squares.sum(dtype=torch.float64)
            sum_of_squares += float(sum_of_part)
        num_values = prod(self.shape)
        return math.sqrt(sum_of_squares / num_values)


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
    header = read_header(path, max_bytes=max_bytes)
    check_tensors(header, expected_tensors(architecture, shape, condition), path.name)
    stored = {}
    # The header lists tensors in the order of their bytes, which follow it side by side.
    num_bytes = sum(spec.bytes for spec in header.values())
    offset = path.stat().st_size - num_bytes
    for name, spec in header.items():
        stored[name] = StoredTensor(
            path=path,
            offset=offset,
            shape=spec.shape,
        )
        offset += spec.bytes
    return stored


class StreamedLinear(nn.Module):
    """A linear layer whose weights stay in a file."""

    def __init__(self, weight: StoredTensor, bias: StoredTensor | None) -> None:
        super().__init__()
        self.weight_OI = weight
        self.bias_O = bias

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return ``x W^T + b``."""
        num_out = self.weight_OI.shape[0]
        if self.bias_O is None:
            bias_O = x_BI.new_zeros(num_out)
        else:
            bias_O = self.bias_O.load()
        out_shape = (*x_BI.shape[:-1], num_out)
        out = x_BI.new_empty(out_shape)
        for rows, weight_OI in self.weight_OI.parts():
            out[..., rows] = F.linear(x_BI, weight_OI, bias_O[rows])
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
        # As a list, because modules are exchanged while it is gone through.
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, attribute = name.rpartition(".")
                streamed = StreamedLinear(
                    weight=stored[f"{name}.weight"],
                    bias=stored.get(f"{name}.bias"),
                )
                parent_module = model.get_submodule(parent)
                setattr(parent_module, attribute, streamed)
        # What is left has no streamed form: convolutions, norms, embeddings.
        resident = {}
        for name in model.state_dict():
            resident[name] = stored[name].load()
        # Assigned, since the model's own weights are on the meta device and have no memory.
        model.load_state_dict(resident, strict=True, assign=True)
        self.resident_bytes = sum(tensor.nbytes for tensor in resident.values())
        self.model = model.eval()
        output_bytes = FLOAT_BYTES * model.widest_output
        bytes_per_sample = _NUM_INTERMEDIATE * output_bytes
        self._batch = max(1, _ACTIVATION_BYTES // bytes_per_sample)

    @torch.no_grad()
    def __call__(
        self,
        x_B: Tensor,
        t_B: Tensor,
        c_B: Tensor | None = None,
    ) -> Tensor:
        """Return the expert's prediction, shape (B, ...); without `c_B`, under the null condition."""
        predictions = []
        for start in range(0, len(x_B), self._batch):
            batch = slice(start, start + self._batch)
            inputs = [x_B[batch], t_B[batch]]
            if c_B is not None:
                inputs.append(c_B[batch])
            predictions.append(self.model(*inputs))
        return torch.cat(predictions)
