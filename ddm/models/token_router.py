"""A transformer that classifies a noised image by expert: one logit per expert."""

# Shape legend: B batch, C channels, H height, W width, N tokens, M kept tokens, D hidden width, E experts.
from dataclasses import replace

import torch
from torch import Tensor, nn

from ddm.models.dit import DitNetwork
from ddm.models.network import Activations
from ddm.protocol.architecture import Condition, Dit, NoCondition, Shape

_INITIAL_DEVIATION = 0.02


class TokenRouter(DitNetwork):
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
        shape: Shape,
        num_experts: int,
        condition: Condition = NoCondition(),
    ) -> None:
        super().__init__(architecture, shape, condition)
        hidden = architecture.hidden
        self.num_experts = num_experts
        self.class_token = nn.Parameter(torch.empty(hidden))
        nn.init.normal_(self.class_token, std=_INITIAL_DEVIATION)
        self.head = nn.Linear(hidden, num_experts)
        answer_layers = [self.head]
        # Of the condition alone, so that p(c | e) needs no image.
        self.shares = None
        if not isinstance(condition, NoCondition):
            self.shares = nn.Linear(hidden, num_experts)
            answer_layers.append(self.shares)
        for layer in answer_layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def log_shares(self, c: Tensor | None, num: int) -> Tensor:
        """Return ``log p(c | e)`` of conditions up to a term common to all experts, shape (B, E); 0 for the null one.

        Args:
            c: as for `forward`.
            num: B.
        """
        if self.shares is None or c is None:
            return self.head.bias.new_zeros(num, self.num_experts)
        # The null condition is equally probable at every expert.
        if self.classes is not None:
            vector_BD = self.classes(c, num)
            has_condition_B = c >= 0
        elif self.text is not None:
            vector_BD = self.text(c, num).mean()
            is_set = c != 0
            has_condition_B = is_set.flatten(1).any(1)
        shares_BE: Tensor = self.shares(vector_BD)
        mask_B1 = has_condition_B.to(vector_BD)[:, None]
        return shares_BE * mask_B1

    def forward(
        self,
        x_BCHW: Tensor,
        t_B: Tensor,
        c: Tensor | None = None,
        *,
        kept_BM: Tensor | None = None,
    ) -> Tensor:
        """Return one logit per expert, shape (B, E); the arguments are those of `DitNetwork.forward`."""
        tokens_BND = self.tokens(x_BCHW, t_B, c, kept_BM)
        class_BD = tokens_BND[:, 0]
        logits_BE: Tensor = self.head(class_BD)
        return logits_BE

    def image_tokens(self, x_BCHW: Tensor, kept_BM: Tensor | None = None) -> Tensor:
        """Return the class token and the image's, shape (B, 1 + N, D) or (B, 1 + M, D)."""
        num_images = x_BCHW.shape[0]
        first = self.class_token.expand(num_images, 1, -1)
        others = super().image_tokens(x_BCHW, kept_BM)
        return torch.cat([first, others], dim=1)

    def activations(self) -> Activations:
        """See `ExpertNetwork`; twice those of the transformer are a safe bound with the token."""
        transformer = super().activations()
        return replace(
            transformer,
            widest=transformer.widest + self.architecture.hidden,
            forward=2 * transformer.forward,
            gradient=2 * transformer.gradient,
        )
