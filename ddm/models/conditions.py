"""Embeds the condition of an expert, a class or a text, and the null condition."""

# Shape legend: B batch, L text tokens, D hidden width.
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.layers import attend, heads_of, normalise
from ddm.protocol.architecture import ClassCondition, TextCondition

_SMALL = 0.02


class ClassEmbedding(nn.Module):
    """One vector per class, and one for the null condition."""

    def __init__(self, condition: ClassCondition, hidden: int, device: str | None = None) -> None:
        super().__init__()
        # Row 0 is the null condition, so that a class beyond the last has no row and is refused.
        self.table = nn.Embedding(1 + condition.num_classes, hidden, device=device)
        nn.init.normal_(self.table.weight, std=_SMALL)

    def forward(self, c_B: Tensor | None, num: int) -> Tensor:
        """Return the classes' vectors, shape (B, D).

        Args:
            c_B: int64; -1 for a sample without a class, None where no sample has one.
            num: B.
        """
        return torch.as_tensor(self.table(class_rows(c_B, num, self.table.weight.device)))


def class_rows(c_B: Tensor | None, num: int, device: torch.device) -> Tensor:
    """Return each sample's row in a table whose first row is the null condition.

    Raises:
        ShapeError: not one whole number per sample.
    """
    if c_B is None:
        return torch.zeros(num, dtype=torch.int64, device=device)
    if c_B.shape != (num,) or c_B.dtype != torch.int64:
        raise ShapeError(
            "classes", expected=f"int64 ({num},)", got=f"{c_B.dtype} {tuple(c_B.shape)}"
        )
    return c_B.to(device) + 1


class Text(NamedTuple):
    """Text tokens for a network to attend to.

    Attributes:
        tokens_BLD: their vectors.
        mask_B11L: whether each is attended to; at least one of every sample is.
    """

    tokens_BLD: Tensor
    mask_B11L: Tensor

    def mean(self) -> Tensor:
        """Return the mean of the attended tokens, shape (B, D)."""
        read_BL1 = self.mask_B11L[:, 0, 0, :, None].to(self.tokens_BLD)
        return (self.tokens_BLD * read_BL1).sum(1) / read_BL1.sum(1)


class TextEmbedding(nn.Module):
    """Text tokens at the network's width; a learned token replaces a missing text."""

    def __init__(self, condition: TextCondition, hidden: int, device: str | None = None) -> None:
        super().__init__()
        self.condition = condition
        self.null = nn.Parameter(torch.zeros(hidden, device=device))
        widen, mix = (
            nn.Linear(condition.dim, hidden, device=device),
            nn.Linear(hidden, hidden, device=device),
        )
        self.mlp = nn.Sequential(widen, nn.GELU(), mix)

    def forward(self, c_BLD: Tensor | None, num: int) -> Text:
        """Return the tokens, and which of them are attended to.

        Args:
            c_BLD: a token of zeros is padding, and a sample of padding alone has no text; None where no sample has one.
            num: B.

        Raises:
            ShapeError: no tokens, more than the plan allows, or tokens of another width.
        """
        if c_BLD is None:
            null = self.null.expand(num, 1, -1)
            return Text(null, torch.ones(num, 1, 1, 1, dtype=torch.bool, device=null.device))
        check_text(c_BLD, num, self.condition)
        read_BL = (c_BLD != 0).any(-1)
        null_BL = torch.zeros_like(read_BL)
        null_BL[:, 0] = ~read_BL.any(-1)
        tokens_BLD = torch.where(null_BL[..., None], self.null, self.mlp(c_BLD))
        return Text(tokens_BLD, (read_BL | null_BL)[:, None, None])


def check_text(c_BLD: Tensor, num: int, condition: TextCondition) -> None:
    """Refuse texts of another shape than the plan's.

    Raises:
        ShapeError: no tokens, more than the plan allows, or tokens of another width.
    """
    most, shape = condition.max_tokens, tuple(c_BLD.shape)
    if len(shape) != 3 or shape[0] != num or not 0 < shape[1] <= most or shape[2] != condition.dim:
        raise ShapeError("text", expected=f"({num}, 1 to {most}, {condition.dim})", got=str(shape))


class CrossAttention(nn.Module):
    """Cross-attention from image tokens to text tokens; at initialisation its output is zero."""

    def __init__(self, hidden: int, heads: int, device: str | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, device=device)
        self.key_value = nn.Linear(hidden, 2 * hidden, device=device)
        self.project = nn.Linear(hidden, hidden, device=device)

    def forward(self, h_BND: Tensor, text: Text) -> Tensor:
        """Return the update of the image tokens, shape (B, N, D)."""
        k_BLD, v_BLD = self.key_value(text.tokens_BLD).chunk(2, -1)
        q_BAND, k_BALD, v_BALD = (
            heads_of(part, self.heads) for part in (self.query(normalise(h_BND)), k_BLD, v_BLD)
        )
        out: Tensor = self.project(attend(q_BAND, k_BALD, v_BALD, text.mask_B11L))
        return out
