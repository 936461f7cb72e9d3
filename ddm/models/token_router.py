"""A transformer that answers one number per expert for a noised image."""

# Shape legend: B batch, C channels, H height, W width, N tokens, D hidden width, E experts.
from torch import Tensor, nn

from ddm.models.dit import DiT


class TokenRouter(DiT):
    """The expert's own transformer with its tokens averaged; a fresh one answers 0 everywhere.

    Args:
        shape: one image, (C, H, W).
        patch: side of a square patch; divides H and W.
        hidden: width of a token; a multiple of `heads`, even.
        depth: number of blocks.
        heads: attention heads.
        num_experts: E.
    """

    def __init__(
        self, shape: tuple[int, int, int], patch: int, hidden: int, depth: int, heads: int, num_experts: int
    ) -> None:
        super().__init__(shape, patch, hidden, depth, heads)
        self.num_experts = num_experts
        self.head = nn.Linear(hidden, num_experts)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return one number per expert, shape (B, E)."""
        answer_BE: Tensor = self.head(self.tokens(x_BCHW, t_B).mean(1))
        return answer_BE
