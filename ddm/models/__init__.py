"""Builds and loads the networks of experts, and computes their sizes and cost before they are built."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddm.io.tensors import TensorSpec, load_tensors
from ddm.models.dit import DiT
from ddm.models.mmdit import MMDiT
from ddm.models.unet import UNet
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)
from ddm.protocol.base import File

__all__ = [
    "build_expert",
    "count_flops",
    "empty_expert",
    "expected_tensors",
    "load_expert",
    "num_parameters",
    "training_flops",
]

MAX_WEIGHT = 1e4

Network = DiT | MMDiT | UNet


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
        return _build(architecture, shape, condition)


def expected_tensors(
    architecture: Architecture, shape: Sequence[int], condition: Condition = NoCondition()
) -> dict[str, TensorSpec]:
    """Name every tensor that this architecture's weights must consist of, without allocating any.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    # what a network computes when it is built, such as positions, takes no memory either
    with torch.device("meta"):
        weights = _build(architecture, shape, condition).state_dict()
    return {name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in weights.items()}


def empty_expert(
    architecture: Architecture, shape: Sequence[int], condition: Condition = NoCondition()
) -> Network:
    """Build an expert on the meta device, without memory for its weights, which the caller assigns.

    Buffers that it computes itself, such as positions, are real.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    return _build(architecture, shape, condition, device="meta")


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
    expert: nn.Module = empty_expert(architecture, shape, condition)
    specs = {
        name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in expert.state_dict().items()
    }
    weights = load_tensors(
        folder / file.path, specs, max_bytes=file.bytes, max_abs=MAX_WEIGHT, digest=file.digest
    )
    expert.load_state_dict(weights, strict=True, assign=True)
    return expert.eval().requires_grad_(False)


def num_parameters(expert: nn.Module) -> int:
    """Count the trained numbers of an expert."""
    return sum(prod(parameter.shape) for parameter in expert.parameters())


def training_flops(
    architecture: Architecture,
    shape: Sequence[int],
    num_images_seen: int,
    condition: Condition = NoCondition(),
) -> int:
    """Return the operations of all matrix products and convolutions, forward and backward, over so many samples.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    return count_flops(architecture, shape, condition)[1] * num_images_seen


def count_flops(
    architecture: Architecture, shape: Sequence[int], condition: Condition = NoCondition()
) -> tuple[int, int]:
    """Return the operations of one sample: of evaluating it, and of evaluation and gradient together.

    Counted by torch on the meta device, matrix products and convolutions only, with texts of full length.

    Raises:
        ShapeError, SetupError: see `build_expert`.
    """
    with torch.device("meta"):
        expert = _build(architecture, shape, condition)
        inputs: tuple[Tensor, ...] = (torch.empty(1, *shape), torch.empty(1))
        match condition:
            case ClassCondition():
                inputs = (*inputs, torch.zeros(1, dtype=torch.int64))
            case TextCondition(dim=dim, max_tokens=max_tokens):
                inputs = (*inputs, torch.empty(1, max_tokens, dim))
        with FlopCounterMode(display=False) as counter:
            answer = expert(*inputs)
            forward = int(counter.get_total_flops())
            torch.autograd.backward(answer.sum())
    return forward, int(counter.get_total_flops())


def _build(
    architecture: Architecture,
    shape: Sequence[int],
    condition: Condition,
    device: str | None = None,
) -> Network:
    match architecture:
        case Dit():
            return DiT(architecture, tuple(shape), condition, device)
        case Mmdit():
            return MMDiT(architecture, tuple(shape), condition, device)
        case Unet():
            return UNet(architecture, tuple(shape), condition, device)
        case _:
            assert_never(architecture)
