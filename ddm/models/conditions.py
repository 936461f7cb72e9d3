"""Embeds the condition of an expert, a class or a text, and the null condition."""

# Shape legend: B batch, N image tokens, L text tokens, D hidden width, A attention heads.
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.layers import attend, heads_of, normalise
from ddm.protocol.architecture import ClassCondition, TextCondition

_INITIAL_DEVIATION = 0.02


class ClassEmbedding(nn.Module):
    """One vector per class, and one for the null condition."""

    def __init__(
        self,
        condition: ClassCondition,
        hidden: int,
        device: str | None = None,
    ) -> None:
        super().__init__()
        # Row 0 is the null condition, so that a class beyond the last has no row and is refused.
        self.table = nn.Embedding(1 + condition.num_classes, hidden, device=device)
        nn.init.normal_(self.table.weight, std=_INITIAL_DEVIATION)

    def forward(self, c_B: Tensor | None, num: int) -> Tensor:
        """Return the classes' vectors, shape (B, D).

        Args:
            c_B: int64; -1 for a sample without a class, None where no sample has one.
            num: B.
        """
        rows_B = class_rows(c_B, num, self.table.weight.device)
        vector_BD: Tensor = self.table(rows_B)
        return vector_BD


def class_rows(
    c_B: Tensor | None,
    num: int,
    device: torch.device,
) -> Tensor:
    """Return each sample's row in a table whose first row is the null condition.

    Raises:
        ShapeError: not one whole number per sample.
    """
    if c_B is None:
        return torch.zeros(num, dtype=torch.int64, device=device)
    if c_B.shape != (num,) or c_B.dtype != torch.int64:
        raise ShapeError(
            "classes",
            expected=f"int64 ({num},)",
            got=f"{c_B.dtype} {tuple(c_B.shape)}",
        )
    # A sample without a class has -1, and with it row 0.
    return c_B.to(device) + 1


class TextTokens(NamedTuple):
    """Text tokens for a network to attend to.

    Attributes:
        tokens_BLD: their vectors.
        mask_B11L: whether each is attended to; at least one of every sample is.
    """

    tokens_BLD: Tensor
    mask_B11L: Tensor

    def mean(self) -> Tensor:
        """Return the mean of the attended tokens, shape (B, D)."""
        mask_BL = self.mask_B11L[:, 0, 0]
        weight_BL1 = mask_BL[..., None].to(self.tokens_BLD)
        sum_BD = (self.tokens_BLD * weight_BL1).sum(1)
        return sum_BD / weight_BL1.sum(1)


class TextEmbedding(nn.Module):
    """Text tokens at the network's width; a learned token replaces a missing text."""

    def __init__(
        self,
        condition: TextCondition,
        hidden: int,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.condition = condition
        self.null = nn.Parameter(torch.zeros(hidden, device=device))
        self.mlp = nn.Sequential(
            nn.Linear(condition.dim, hidden, device=device),
            nn.GELU(),
            nn.Linear(hidden, hidden, device=device),
        )

    def forward(self, c_BLD: Tensor | None, num: int) -> TextTokens:
        """Return the tokens, and which of them are attended to.

        Args:
            c_BLD: a token of zeros is padding, and a sample of padding alone has no text; None where no sample has one.
            num: B.

        Raises:
            ShapeError: no tokens, more than the plan allows, or tokens of another width.
        """
        if c_BLD is None:
            null_B1D = self.null.expand(num, 1, -1)
            shape = (num, 1, 1, 1)
            mask_B11L = torch.ones(shape, dtype=torch.bool, device=null_B1D.device)
            return TextTokens(null_B1D, mask_B11L)

        check_text(c_BLD, num, self.condition)
        is_token_BL = (c_BLD != 0).any(-1)
        has_text_B = is_token_BL.any(-1)
        # A sample without a text attends to the learned token in its first place.
        is_null_BL = torch.zeros_like(is_token_BL)
        is_null_BL[:, 0] = ~has_text_B
        embedded_BLD = self.mlp(c_BLD)
        tokens_BLD = torch.where(is_null_BL[..., None], self.null, embedded_BLD)
        is_attended_BL = is_token_BL | is_null_BL
        # Two axes more, over attention heads and over the tokens that attend.
        return TextTokens(tokens_BLD, is_attended_BL[:, None, None])


def check_text(
    c_BLD: Tensor,
    num: int,
    condition: TextCondition,
) -> None:
    """Refuse texts of another shape than the plan's.

    Raises:
        ShapeError: no tokens, more than the plan allows, or tokens of another width.
    """
    shape = tuple(c_BLD.shape)
    max_tokens = condition.max_tokens
    fits = False
    if len(shape) == 3:
        num_texts, num_tokens, dim = shape
        has_tokens = 0 < num_tokens <= max_tokens
        fits = num_texts == num and dim == condition.dim and has_tokens
    if not fits:
        raise ShapeError(
            "text",
            expected=f"({num}, 1 to {max_tokens}, {condition.dim})",
            got=str(shape),
        )


class CrossAttention(nn.Module):
    """Cross-attention from image tokens to text tokens; at initialisation its output is zero."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, device=device)
        self.key_value = nn.Linear(hidden, 2 * hidden, device=device)
        self.project = nn.Linear(hidden, hidden, device=device)

    def forward(self, h_BND: Tensor, text: TextTokens) -> Tensor:
        """Return the update of the image tokens, shape (B, N, D)."""
        q_BND = self.query(normalise(h_BND))
        k_BLD, v_BLD = self.key_value(text.tokens_BLD).chunk(2, -1)
        mixed_BND = attend(
            heads_of(q_BND, self.heads),
            heads_of(k_BLD, self.heads),
            heads_of(v_BLD, self.heads),
            text.mask_B11L,
        )
        out: Tensor = self.project(mixed_BND)
        return out
