"""Masked training: a step trains on some of an image's tokens to save time; the last steps train on all of them.

Only the kept tokens enter the network, and the loss covers only them. The published method also reconstructs the masked
pixels with a small decoder; without it, the released expert has no additional weights.

Source:
    Zheng et al. 2023, Fast training of diffusion models with masked transformers, arXiv 2306.09305.
"""

# Shape legend: B batch, N tokens, M tokens kept, P values of a patch.
import numpy as np
import torch
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.dit import DitNetwork
from ddm.models.layers import gather_tokens, patches_of
from ddm.protocol.learning import Training


def first_whole_step(settings: Training) -> int:
    """Return the first of the last steps, which train on all tokens."""
    if not settings.mask_ratio:
        return 0
    return settings.num_steps - round(settings.unmasked_share * settings.num_steps)


def leaves_out(settings: Training, step: int) -> bool:
    """Whether a step masks tokens."""
    return step < first_whole_step(settings)


def num_kept(num_tokens: int, ratio: float) -> int:
    """Return how many tokens of an image are kept; at least one."""
    return max(1, round((1 - ratio) * num_tokens))


def draw_kept(
    num: int,
    num_tokens: int,
    ratio: float,
    random: np.random.Generator,
) -> Tensor:
    """Draw which tokens of each image are kept, uniformly among all sets of that size, ascending, shape (B, M)."""
    # The order of independent random numbers is a uniformly random permutation.
    uniform_BN = random.random((num, num_tokens))
    order_BN = uniform_BN.argsort(axis=1)
    kept_BM = order_BN[:, : num_kept(num_tokens, ratio)]
    return torch.from_numpy(np.sort(kept_BM, axis=1))


def kept_patches(model: nn.Module, x_BCHW: Tensor, kept_BM: Tensor) -> Tensor:
    """Return the patches of the kept tokens, the target of a model that sees only these, shape (B, M, P).

    Raises:
        ShapeError: the model has no tokens.
    """
    if not isinstance(model, DitNetwork):
        raise ShapeError("kept tokens", expected="a DiT", got=f"a {type(model).__name__}")
    patches_BNP = patches_of(x_BCHW, model.patch)
    return gather_tokens(patches_BNP, kept_BM)


def tokens_of(model: nn.Module, settings: Training) -> int:
    """Return the number of an image's tokens.

    Raises:
        ShapeError: a mask_ratio above 0, and a model without tokens.
    """
    if isinstance(model, DitNetwork):
        return len(model.position_ND)
    if settings.mask_ratio:
        got = f"{settings.mask_ratio:g} for a {type(model).__name__}"
        raise ShapeError("mask_ratio", expected="0, or a DiT", got=got)
    return 0
