"""Which tokens of an image does a step look at? Leaving some out makes a step cheaper; the last steps see them all.

Only what is kept enters the network, and the loss is over what is kept. The published method also fills the gaps by a
small decoder and rebuilds the pixels there; without either, nothing is added to the expert that is released.

Source:
    Zheng et al. 2023, Fast training of diffusion models with masked transformers, arXiv 2306.09305.
"""

# Shape legend: B batch, N tokens, M tokens kept, P values of a patch.
import numpy as np
import torch
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.dit import DiT
from ddm.models.layers import patches_of, taken
from ddm.protocol.plan import Training


def first_whole_step(settings: Training) -> int:
    """Return the first of the last steps, which leave nothing out."""
    return settings.num_steps - round(settings.unmasked_share * settings.num_steps) if settings.mask_ratio else 0


def leaves_out(settings: Training, step: int) -> bool:
    """Whether a step looks at a part of the tokens only."""
    return step < first_whole_step(settings)


def num_kept(num_tokens: int, ratio: float) -> int:
    """Return how many tokens of an image are kept; at least one."""
    return max(1, round((1 - ratio) * num_tokens))


def draw_kept(num: int, num_tokens: int, ratio: float, random: np.random.Generator) -> Tensor:
    """Draw which tokens of each image are kept, uniformly among all sets of that size, ascending, shape (B, M)."""
    order_BN = random.random((num, num_tokens)).argsort(axis=1)
    return torch.from_numpy(np.sort(order_BN[:, : num_kept(num_tokens, ratio)], axis=1))


def kept_patches(model: nn.Module, x_BCHW: Tensor, kept_BM: Tensor) -> Tensor:
    """Return what a model that looks at these tokens alone has to answer, shape (B, M, P).

    Raises:
        ShapeError: the model has no tokens.
    """
    if not isinstance(model, DiT):
        raise ShapeError("kept tokens", expected="a DiT", got=type(model).__name__)
    return taken(patches_of(x_BCHW, model.patch), kept_BM)


def tokens_of(model: nn.Module, settings: Training) -> int:
    """Return the number of an image's tokens.

    Raises:
        ShapeError: tokens shall be left out, and the model has none.
    """
    if isinstance(model, DiT):
        return len(model.position_ND)
    if settings.mask_ratio:
        raise ShapeError("mask_ratio", expected="0, or a DiT", got=f"{settings.mask_ratio:g}")
    return 0
