"""The multimodal diffusion transformer: joint attention over image and text tokens.

The first blocks have separate weights for image and text tokens, as in Stable Diffusion 3. The last `shared_depth`
blocks have one set for both and compute attention and network in parallel, with less than half of the weights. Queries
and keys are normalised in each head, which keeps training in bf16 stable. In place of a pooled text vector from a
second encoder, the mean of the text tokens is added to the time.
"""

# Shape legend: B batch, C channels, H height, W width, N image tokens, L text tokens, T of either kind, D hidden width,
# A attention heads, M modulations.
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.conditions import TextEmbedding
from ddm.models.layers import (
    MLP_RATIO,
    HeadNorm,
    TimeEmbedding,
    attend,
    check_fit,
    check_input,
    images_of,
    initialise,
    modulate,
    patches_of,
    sincos_positions,
)
from ddm.protocol.architecture import Condition, Mmdit, TextCondition

_OF_STREAM, _OF_READ, _OF_SHARED = 6, 2, 3  # modulations


class MMDiT(nn.Module):
    """A text-conditional transformer with joint attention and adaLN-zero in both streams; a fresh one returns 0.

    Args:
        architecture: its sizes.
        shape: one image, (C, H, W).
        condition: a text; this network takes no other.
        device: where the weights are created; on ``meta`` they have no memory, and the caller assigns them.

    Raises:
        ShapeError: the architecture does not fit the shape or the condition.

    Source:
        Esser et al. 2024, arXiv 2403.03206; for the shared blocks, Dehghani et al. 2023 (ViT-22B), arXiv 2302.05442.
    """

    position_ND: Tensor

    def __init__(
        self,
        architecture: Mmdit,
        shape: tuple[int, ...],
        condition: Condition,
        device: str | None = None,
    ) -> None:
        super().__init__()
        check_fit(architecture, shape, condition)
        if not isinstance(condition, TextCondition):
            raise ShapeError(
                "condition", expected="the kind text", got=f"the kind {condition.kind}"
            )
        (channels, height, width), patch, hidden = shape, architecture.patch, architecture.hidden
        rows, columns = height // patch, width // patch
        self.shape, self.patch, self.num_tokens = shape, patch, rows * columns
        self.embed = nn.Linear(channels * patch * patch, hidden, device=device)
        self.register_buffer(
            "position_ND",
            sincos_positions(rows, columns, hidden, architecture.position_grid),
            persistent=False,
        )
        self.time, self.text = (
            TimeEmbedding(hidden, device),
            TextEmbedding(condition, hidden, device),
        )
        self.pooled = nn.Linear(hidden, hidden, device=device)
        num_joint = architecture.depth - architecture.shared_depth
        # Nothing uses the text tokens after the very last block, so that block does not compute them.
        answers = [i + 1 < architecture.depth for i in range(num_joint)]
        self.joint = nn.ModuleList(
            JointBlock(hidden, architecture.heads, each, device) for each in answers
        )
        self.shared = nn.ModuleList(
            SharedBlock(hidden, architecture.heads, device)
            for _ in range(architecture.shared_depth)
        )
        joint = [(_OF_STREAM + (_OF_STREAM if each else _OF_READ)) * hidden for each in answers]
        self.widths = [*joint, *[_OF_SHARED * hidden] * architecture.shared_depth, 2 * hidden]
        self.modulation = nn.Linear(hidden, sum(self.widths), device=device)
        self.head = nn.Linear(hidden, channels * patch * patch, device=device)
        initialise(self, self.time, self.modulation, self.head)
        wide = 3 + MLP_RATIO if architecture.shared_depth else MLP_RATIO
        self.widest = max(
            sum(self.widths), wide * hidden * (self.num_tokens + condition.max_tokens)
        )

    def forward(self, x_BCHW: Tensor, t_B: Tensor, c_BLD: Tensor | None = None) -> Tensor:
        """Return the prediction at (x, t).

        Args:
            x_BCHW: noised images.
            t_B: times in [0, 1], shape (B,).
            c_BLD: text tokens, see `ddm.models.conditions.TextEmbedding`; None for the null condition.

        Returns:
            Shape (B, C, H, W), velocity or eps by the objective.

        Raises:
            ShapeError: images or texts of another shape than the model's, or not one time per image.
        """
        check_input(x_BCHW, t_B, self.shape)
        text = self.text(c_BLD, len(t_B))
        h_BND = self.embed(patches_of(x_BCHW, self.patch)) + self.position_ND
        condition_BD = self.time(t_B) + self.pooled(text.mean())
        by_block = torch.split(self.modulation(F.silu(condition_BD))[:, None], self.widths, -1)
        mask_B11T = F.pad(text.mask_B11L, (self.num_tokens, 0), value=True)
        g_BLD = text.tokens_BLD
        for block, modulation in zip(self.joint, by_block, strict=False):
            h_BND, g_BLD = block(h_BND, g_BLD, modulation, mask_B11T)
        if len(self.shared):
            h_BTD = torch.cat([h_BND, g_BLD], dim=1)
            for block, modulation in zip(self.shared, by_block[len(self.joint) :], strict=False):
                h_BTD = block(h_BTD, modulation, mask_B11T)
            h_BND = h_BTD[:, : self.num_tokens]
        patches_BND = self.head(modulate(h_BND, *by_block[-1].chunk(2, -1)))
        return images_of(patches_BND, self.shape, self.patch)


class Stream(nn.Module):
    """The weights of one kind of token in a block; without `answers` its tokens give keys and values only."""

    def __init__(self, hidden: int, heads: int, answers: bool, device: str | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, (3 if answers else 2) * hidden, device=device)
        self.norms = _norms(hidden // heads, 2 if answers else 1, device)
        if answers:
            self.project = nn.Linear(hidden, hidden, device=device)
            self.up = nn.Linear(hidden, MLP_RATIO * hidden, device=device)
            self.down = nn.Linear(MLP_RATIO * hidden, hidden, device=device)

    def keys_values_queries(self, h_BTD: Tensor) -> list[Tensor]:
        """Return keys, values and, with `answers`, queries, each of shape (B, A, T, D / A)."""
        return _normalised(self.qkv(h_BTD), self.norms, self.heads)

    def update(self, h_BTD: Tensor, mixed_BTD: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        """Return the tokens after this block, from the output of attention and (gate, shift, scale, gate)."""
        gate_a, shift_m, scale_m, gate_m = modulation
        h_BTD = torch.addcmul(h_BTD, gate_a, self.project(mixed_BTD))
        mlp = self.down(F.gelu(self.up(modulate(h_BTD, shift_m, scale_m))))
        return torch.addcmul(h_BTD, gate_m, mlp)


class JointBlock(nn.Module):
    """Joint attention over image and text tokens, with separate weights for each kind."""

    def __init__(
        self, hidden: int, heads: int, text_answers: bool, device: str | None = None
    ) -> None:
        super().__init__()
        self.image = Stream(hidden, heads, True, device)
        self.text = Stream(hidden, heads, text_answers, device)
        self.text_answers = text_answers

    def forward(
        self, h_BND: Tensor, g_BLD: Tensor, modulation: Tensor, mask_B11T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return image and text tokens after this block; the mask is False where text is padding."""
        count = _OF_STREAM + (_OF_STREAM if self.text_answers else _OF_READ)
        shift_h, scale_h, *of_image = modulation.chunk(count, -1)
        shift_g, scale_g, *of_text = of_image[_OF_STREAM - 2 :]
        k_h, v_h, q_h = self.image.keys_values_queries(modulate(h_BND, shift_h, scale_h))
        k_g, v_g, *q_g = self.text.keys_values_queries(modulate(g_BLD, shift_g, scale_g))
        k, v, q = torch.cat([k_h, k_g], 2), torch.cat([v_h, v_g], 2), torch.cat([q_h, *q_g], 2)
        mixed_BTD = attend(q, k, v, mask_B11T)
        num = h_BND.shape[1]
        h_BND = self.image.update(h_BND, mixed_BTD[:, :num], tuple(of_image[: _OF_STREAM - 2]))
        if self.text_answers:
            g_BLD = self.text.update(g_BLD, mixed_BTD[:, num:], tuple(of_text))
        return h_BND, g_BLD


class SharedBlock(nn.Module):
    """Attention over both kinds of token and, in parallel, a two-layer network: two matrix products in all."""

    def __init__(self, hidden: int, heads: int, device: str | None = None) -> None:
        super().__init__()
        self.heads, self.parts = heads, [3 * hidden, MLP_RATIO * hidden]
        self.wide = nn.Linear(hidden, sum(self.parts), device=device)
        self.norms = _norms(hidden // heads, 2, device)
        self.narrow = nn.Linear((1 + MLP_RATIO) * hidden, hidden, device=device)

    def forward(self, h_BTD: Tensor, modulation: Tensor, mask_B11T: Tensor) -> Tensor:
        """Return the tokens after this block; the mask is False where text is padding."""
        shift, scale, gate = modulation.chunk(_OF_SHARED, -1)
        kvq, up = self.wide(modulate(h_BTD, shift, scale)).split(self.parts, -1)
        k, v, q = _normalised(kvq, self.norms, self.heads)
        both = torch.cat([attend(q, k, v, mask_B11T), F.gelu(up)], dim=-1)
        return torch.addcmul(h_BTD, gate, self.narrow(both))


def _norms(width: int, num: int, device: str | None) -> nn.ModuleList:
    return nn.ModuleList(HeadNorm(width, device) for _ in range(num))


def _normalised(kvq: Tensor, norms: nn.ModuleList, heads: int) -> list[Tensor]:
    """Split keys, values and queries (if there are any), and normalise keys and queries in every head."""
    batch, tokens, _ = kvq.shape
    parts = list(kvq.reshape(batch, tokens, 1 + len(norms), heads, -1).permute(2, 0, 3, 1, 4))
    for place, norm in zip((0, 2), norms, strict=False):
        parts[place] = norm(parts[place])
    return parts
