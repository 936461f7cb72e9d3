"""Which network an architecture names, and what it will weigh and cost before it is built."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import nn

from ddm.errors import ShapeError
from ddm.models.dit import DiT
from ddm.protocol.base import File
from ddm.protocol.plan import Dit
from ddm.tensors import TensorSpec, load_tensors

__all__ = ["build_expert", "expected_tensors", "load_expert", "num_parameters", "training_flops"]

MAX_WEIGHT = 1e4


def build_expert(architecture: Dit, shape: Sequence[int], *, seed: int = 0) -> nn.Module:
    """Build an expert with seeded initial weights; the caller's random state is left as it was.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W).
        seed: same seed, same weights.

    Raises:
        ShapeError: the architecture does not fit the shape.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(architecture, shape)


def expected_tensors(architecture: Dit, shape: Sequence[int]) -> dict[str, TensorSpec]:
    """Name every tensor that this architecture's weights must consist of, without allocating any.

    Raises:
        ShapeError: the architecture does not fit the shape.
    """
    with torch.device("meta"):
        weights = _build(architecture, shape).state_dict()
    return {name: TensorSpec("F32", tuple(tensor.shape)) for name, tensor in weights.items()}


def load_expert(architecture: Dit, shape: Sequence[int], folder: Path, file: File) -> nn.Module:
    """Build an expert and load its weights, checked against the digest and the shapes that the architecture implies.

    Args:
        architecture: what the plan names.
        shape: one image, (C, H, W).
        folder: holds the file.
        file: as a signed document lists it.

    Raises:
        DigestError: the file is not the one listed.
        TensorFileError: the file holds other tensors, or numbers that no training makes.
    """
    specs = expected_tensors(architecture, shape)
    weights = load_tensors(folder / file.path, specs, max_bytes=file.bytes, max_abs=MAX_WEIGHT, digest=file.digest)
    # Weights that are replaced at once need neither memory nor random numbers.
    expert: nn.Module = _build(architecture, shape, device="meta")
    expert.load_state_dict(weights, strict=True, assign=True)
    return expert.eval().requires_grad_(False)


def num_parameters(expert: nn.Module) -> int:
    """Count the trained numbers of an expert."""
    return sum(prod(parameter.shape) for parameter in expert.parameters())


def training_flops(architecture: Dit, shape: Sequence[int], num_images_seen: int) -> int:
    """Floating point operations of all matrix products, forward and backward, over so many images.

    Raises:
        ShapeError: the architecture does not fit the shape.
    """
    with torch.device("meta"):
        return _build(architecture, shape).training_flops_per_image() * num_images_seen


def _build(architecture: Dit, shape: Sequence[int], device: str | None = None) -> DiT:
    if len(shape) != 3:
        raise ShapeError("image shape", expected="(C, H, W)", got=str(tuple(shape)))
    size = (shape[0], shape[1], shape[2])
    return DiT(size, architecture.patch, architecture.hidden, architecture.depth, architecture.heads, device)
