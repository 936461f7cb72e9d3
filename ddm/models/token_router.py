"""A transformer that classifies a noised image by expert: one logit per expert."""

# Shape legend: B batch, C channels, H height, W width, N tokens, D hidden width, E experts.
import torch
from torch import Tensor, nn

from ddm.models.dit import DiT
from ddm.protocol.architecture import Condition, Dit, NoCondition

_SMALL = 0.02


class TokenRouter(DiT):
    """A DiT with a class token, from which it computes the logits; a fresh one returns 0 everywhere.

    With a condition it also says how probable the condition is at each expert, which no image is needed for.

    Args:
        architecture: its sizes.
        shape: one image, (C, H, W).
        num_experts: E.
        condition: the kind of condition that it takes.

    Raises:
        ShapeError: the architecture does not fit the shape.

    Source:
        McAllister et al. 2025, whose router is a DiT; Dosovitskiy et al. 2021, for the token.
    """

    def __init__(
        self,
        architecture: Dit,
        shape: tuple[int, ...],
        num_experts: int,
        condition: Condition = NoCondition(),
    ) -> None:
        super().__init__(architecture, shape, condition)
        self.num_experts = num_experts
        self.class_token = nn.Parameter(torch.empty(architecture.hidden))
        nn.init.normal_(self.class_token, std=_SMALL)
        self.head = nn.Linear(architecture.hidden, num_experts)
        told = not isinstance(condition, NoCondition)
        self.shares = nn.Linear(architecture.hidden, num_experts) if told else None
        for last in (self.head, *([self.shares] if self.shares else [])):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def log_shares(self, c: Tensor | None, num: int) -> Tensor:
        """Return ``log p(c | e)`` of conditions up to a term common to all experts, shape (B, E); 0 for the null one.

        Args:
            c: as for `forward`.
            num: B.
        """
        if self.shares is None or c is None:
            return self.head.bias.new_zeros(num, self.num_experts)
        if self.classes is not None:
            read_BD, told_B = self.classes(c, num), c >= 0
        elif self.text is not None:
            read_BD, told_B = self.text(c, num).mean(), (c != 0).flatten(1).any(1)
        found_BE: Tensor = self.shares(read_BD) * told_B.to(read_BD)[:, None]
        return found_BE

    def forward(
        self, x_BCHW: Tensor, t_B: Tensor, c: Tensor | None = None, *, kept_BM: Tensor | None = None
    ) -> Tensor:
        """Return one logit per expert, shape (B, E); the arguments are those of `DiT.forward`."""
        answer_BE: Tensor = self.head(self.tokens(x_BCHW, t_B, c, kept_BM)[:, 0])
        return answer_BE

    def image_tokens(self, x_BCHW: Tensor, kept_BM: Tensor | None = None) -> Tensor:
        """Return the class token and the image's, shape (B, 1 + N, D) or (B, 1 + M, D)."""
        first = self.class_token.expand(len(x_BCHW), 1, -1)
        return torch.cat([first, super().image_tokens(x_BCHW, kept_BM)], dim=1)
