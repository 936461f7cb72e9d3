"""A model's weights as one vector: Flower asks the server for each array of a message by a call of its own."""

from collections.abc import Mapping

import torch
from torch import Tensor

WEIGHTS = "weights"


def flat(state: Mapping[str, Tensor]) -> Tensor:
    """Return all values, shape (D,), in the order of the mapping."""
    return torch.cat([value.detach().cpu().flatten() for value in state.values()])


def named(vector_D: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a vector's values under the names and in the shapes of `like`; the inverse of `flat`."""
    parts = torch.split(vector_D, [value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape).clone()
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
