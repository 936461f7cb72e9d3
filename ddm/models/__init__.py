"""Builds and loads the networks of experts, and computes their sizes and cost before they are built."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddm.io.tensors import TensorSpec, load_tensors
from ddm.models.network import (
    ExpertNetwork,
    NetworkSize,
    build_network,
    num_parameters,
    size_of,
)
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    NoCondition,
    Shape,
    TextCondition,
)
from ddm.protocol.base import File

__all__ = [
    "build_expert",
    "count_flops",
    "empty_expert",
    "expected_tensors",
    "load_expert",
    "network_size",
    "num_parameters",
    "training_flops",
]

# Of a received weight, either sign; honest ones are far below.
MAX_WEIGHT = 1e4


def build_expert(
    architecture: Architecture,
    shape: Sequence[int],
    *,
    condition: Condition = NoCondition(),
    seed: int = 0,
) -> nn.Module:
    """Build an expert with seeded initial weights; the caller's random state is left as it was.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W), or volume, (C, D, H, W).
        condition: the kind of condition that the expert takes.
        seed: same seed, same weights.

    Returns:
        Called as ``expert(x_B, t_B)`` or, if it has a condition, ``expert(x_B, t_B, c)``.

    Raises:
        ShapeError: the architecture does not fit the shape or the condition.
        SetupError: the architecture needs a library that is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_network(architecture, tuple(shape), condition)


def expected_tensors(
    architecture: Architecture,
    shape: Sequence[int],
    condition: Condition = NoCondition(),
) -> dict[str, TensorSpec]:
    """Name every tensor that this architecture's weights must consist of, without allocating any.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    return _specs_of(_on_meta(architecture, shape, condition))


@lru_cache(maxsize=32)
def network_size(
    architecture: Architecture,
    shape: Shape,
    condition: Condition = NoCondition(),
) -> NetworkSize:
    """Return how large an expert is, without allocating it; sizes that no machine has are counted as well.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    return size_of(_on_meta(architecture, shape, condition))


def empty_expert(
    architecture: Architecture,
    shape: Sequence[int],
    condition: Condition = NoCondition(),
) -> ExpertNetwork:
    """Build an expert on the meta device, without memory for its weights, which the caller assigns.

    Buffers that it computes itself, such as positions, are real.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    return build_network(architecture, tuple(shape), condition, device="meta")


def load_expert(
    architecture: Architecture,
    shape: Sequence[int],
    folder: Path,
    file: File,
    condition: Condition = NoCondition(),
) -> nn.Module:
    """Build an expert and load its weights, checked against the digest and the shapes that the architecture implies.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W), or volume, (C, D, H, W).
        folder: holds the file.
        file: as a signed document lists it.
        condition: the kind of condition that the expert takes.

    Raises:
        DigestError: the file differs from the one listed.
        TensorFileError: the file holds other tensors, or weights beyond `MAX_WEIGHT`.
        SetupError: the architecture needs a library that is not installed.
    """
    # The initial weights are replaced at once, so they need neither memory nor random numbers.
    expert = empty_expert(architecture, shape, condition)
    weights = load_tensors(
        folder / file.path,
        _specs_of(expert),
        max_bytes=file.bytes,
        max_abs=MAX_WEIGHT,
        digest=file.digest,
    )
    expert.load_state_dict(weights, strict=True, assign=True)
    return expert.eval().requires_grad_(False)


def training_flops(
    architecture: Architecture,
    shape: Sequence[int],
    num_images_seen: int,
    condition: Condition = NoCondition(),
) -> int:
    """Return the operations of all matrix products and convolutions, forward and backward, over this many samples.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    _, training_step = count_flops(architecture, tuple(shape), condition)
    return training_step * num_images_seen


@lru_cache(maxsize=32)
def count_flops(
    architecture: Architecture,
    shape: Shape,
    condition: Condition = NoCondition(),
) -> tuple[int, int]:
    """Return the operations of one sample: of evaluating it, and of evaluation and gradient together.

    Counted by torch on the meta device, matrix products and convolutions only, with texts of full length.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    expert = _on_meta(architecture, shape, condition)
    with torch.device("meta"):
        inputs: list[Tensor] = [torch.empty(1, *shape), torch.empty(1)]
        if isinstance(condition, ClassCondition):
            inputs.append(torch.zeros(1, dtype=torch.int64))
        elif isinstance(condition, TextCondition):
            inputs.append(torch.empty(1, condition.max_tokens, condition.dim))
        with FlopCounterMode(display=False) as counter:
            prediction = expert(*inputs)
            forward = int(counter.get_total_flops())
            torch.autograd.backward(prediction.sum())
    return forward, int(counter.get_total_flops())


def _on_meta(
    architecture: Architecture,
    shape: Sequence[int],
    condition: Condition,
) -> ExpertNetwork:
    # Under the context, what a network computes when it is built, such as positions, takes no memory either. The bounds
    # of a document keep every size within the range of torch's counters.
    with torch.device("meta"):
        return build_network(architecture, tuple(shape), condition)


def _specs_of(expert: nn.Module) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in expert.state_dict().items()
    }
