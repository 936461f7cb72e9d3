"""The multimodal diffusion transformer: image and text tokens attend to each other and to themselves at once.

The first blocks have weights of their own for either kind of token, as in Stable Diffusion 3. The last `shared_depth`
have one set for both and run attention and network side by side, for less than half of the weights. Queries and keys
are normalised head by head, which keeps training in bf16 stable. In place of a pooled text vector from a second
encoder, the mean of the text tokens joins the time.
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
    """A text-conditional transformer with joint attention and adaLN-zero in both streams; a fresh one answers 0.

    Args:
        architecture: its sizes.
        shape: one image, (C, H, W).
        condition: a text; others are refused, since this network is about joining the tokens of one.
        device: where the weights are made; on ``meta`` they are not, and somebody assigns them afterwards.

    Raises:
        ShapeError: the architecture does not fit the shape or the condition.

    Source:
        Esser et al. 2024, arXiv 2403.03206; for the shared blocks, Dehghani et al. 2023 (ViT-22B), arXiv 2302.05442.
    """

    position_ND: Tensor

    def __init__(
        self, architecture: Mmdit, shape: tuple[int, ...], condition: Condition, device: str | None = None
    ) -> None:
        super().__init__()
        check_fit(architecture, shape, condition)
        if not isinstance(condition, TextCondition):
            raise ShapeError("condition", expected="text", got=condition.kind)
        (channels, height, width), patch, hidden = shape, architecture.patch, architecture.hidden
        rows, columns = height // patch, width // patch
        self.shape, self.patch, self.num_tokens = shape, patch, rows * columns
        self.embed = nn.Linear(channels * patch * patch, hidden, device=device)
        self.register_buffer("position_ND", sincos_positions(rows, columns, hidden), persistent=False)
        self.time, self.text = TimeEmbedding(hidden, device), TextEmbedding(condition, hidden, device)
        self.pooled = nn.Linear(hidden, hidden, device=device)
        num_joint = architecture.depth - architecture.shared_depth
        # After the last block of all nobody reads the text tokens, so that this one need not answer them.
        answers = [i + 1 < architecture.depth for i in range(num_joint)]
        self.joint = nn.ModuleList(JointBlock(hidden, architecture.heads, each, device) for each in answers)
        self.shared = nn.ModuleList(
            SharedBlock(hidden, architecture.heads, device) for _ in range(architecture.shared_depth)
        )
        joint = [(_OF_STREAM + (_OF_STREAM if each else _OF_READ)) * hidden for each in answers]
        self.widths = [*joint, *[_OF_SHARED * hidden] * architecture.shared_depth, 2 * hidden]
        self.modulation = nn.Linear(hidden, sum(self.widths), device=device)
        self.head = nn.Linear(hidden, channels * patch * patch, device=device)
        initialise(self, self.time, self.modulation, self.head)
        wide = 3 + MLP_RATIO if architecture.shared_depth else MLP_RATIO
        self.widest = max(sum(self.widths), wide * hidden * (self.num_tokens + condition.max_tokens))

    def forward(self, x_BCHW: Tensor, t_B: Tensor, c_BLD: Tensor | None = None) -> Tensor:
        """Answer the prediction at (x, t).

        Args:
            x_BCHW: noised images.
            t_B: times in [0, 1], shape (B,).
            c_BLD: text tokens, as `ddm.models.conditions.TextEmbedding` reads them; None: nobody has a text.

        Returns:
            Shape (B, C, H, W), whatever the objective trained it to answer.

        Raises:
            ShapeError: images of another shape than the model's, not one time per image, or no such text.
        """
        check_input(x_BCHW, t_B, self.shape)
        text = self.text(c_BLD, len(t_B))
        h_BND = self.embed(patches_of(x_BCHW, self.patch)) + self.position_ND
        told_BD = self.time(t_B) + self.pooled(text.mean())
        by_block = torch.split(self.modulation(F.silu(told_BD))[:, None], self.widths, -1)
        mask_B11T = F.pad(text.mask_B11L, (self.num_tokens, 0), value=True)
        g_BLD = text.tokens_BLD
        for block, modulation in zip(self.joint, by_block, strict=False):
            h_BND, g_BLD = block(h_BND, g_BLD, modulation, mask_B11T)
        if len(self.shared):
            h_BTD = torch.cat([h_BND, g_BLD], dim=1)
            for block, modulation in zip(self.shared, by_block[len(self.joint) :], strict=False):
                h_BTD = block(h_BTD, modulation, mask_B11T)
            h_BND = h_BTD[:, : self.num_tokens]
        answer_BND = self.head(modulate(h_BND, *by_block[-1].chunk(2, -1)))
        return images_of(answer_BND, self.shape, self.patch)


class Stream(nn.Module):
    """The weights of one kind of token in a block; without `answers`, only to be read."""

    def __init__(self, hidden: int, heads: int, answers: bool, device: str | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, (3 if answers else 2) * hidden, device=device)
        self.norms = _norms(hidden // heads, 2 if answers else 1, device)
        if answers:
            self.project = nn.Linear(hidden, hidden, device=device)
            self.up = nn.Linear(hidden, MLP_RATIO * hidden, device=device)
            self.down = nn.Linear(MLP_RATIO * hidden, hidden, device=device)

    def asked(self, h_BTD: Tensor) -> list[Tensor]:
        """Return keys, values and, where the stream answers, queries, each of shape (B, A, T, D / A)."""
        return _normalised(self.qkv(h_BTD), self.norms, self.heads)

    def answer(self, h_BTD: Tensor, mixed_BTD: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        """Return the tokens after this block, from what they read and (gate, shift, scale, gate)."""
        gate_a, shift_m, scale_m, gate_m = modulation
        h_BTD = torch.addcmul(h_BTD, gate_a, self.project(mixed_BTD))
        mlp = self.down(F.gelu(self.up(modulate(h_BTD, shift_m, scale_m))))
        return torch.addcmul(h_BTD, gate_m, mlp)


class JointBlock(nn.Module):
    """One attention over image and text tokens, with weights of either kind's own."""

    def __init__(self, hidden: int, heads: int, text_answers: bool, device: str | None = None) -> None:
        super().__init__()
        self.image = Stream(hidden, heads, True, device)
        self.text = Stream(hidden, heads, text_answers, device)
        self.text_answers = text_answers

    def forward(self, h_BND: Tensor, g_BLD: Tensor, modulation: Tensor, mask_B11T: Tensor) -> tuple[Tensor, Tensor]:
        """Return image and text tokens after this block; the mask is False where text is padding."""
        count = _OF_STREAM + (_OF_STREAM if self.text_answers else _OF_READ)
        shift_h, scale_h, *of_image = modulation.chunk(count, -1)
        shift_g, scale_g, *of_text = of_image[_OF_STREAM - 2 :]
        k_h, v_h, q_h = self.image.asked(modulate(h_BND, shift_h, scale_h))
        k_g, v_g, *q_g = self.text.asked(modulate(g_BLD, shift_g, scale_g))
        k, v, q = torch.cat([k_h, k_g], 2), torch.cat([v_h, v_g], 2), torch.cat([q_h, *q_g], 2)
        mixed_BTD = attend(q, k, v, mask_B11T)
        num = h_BND.shape[1]
        h_BND = self.image.answer(h_BND, mixed_BTD[:, :num], tuple(of_image[: _OF_STREAM - 2]))
        if self.text_answers:
            g_BLD = self.text.answer(g_BLD, mixed_BTD[:, num:], tuple(of_text))
        return h_BND, g_BLD


class SharedBlock(nn.Module):
    """One attention over both kinds of token and, beside it, one two-layer network; two matrix products in all."""

    def __init__(self, hidden: int, heads: int, device: str | None = None) -> None:
        super().__init__()
        self.heads, self.parts = heads, [3 * hidden, MLP_RATIO * hidden]
        self.wide = nn.Linear(hidden, sum(self.parts), device=device)
        self.norms = _norms(hidden // heads, 2, device)
        self.narrow = nn.Linear((1 + MLP_RATIO) * hidden, hidden, device=device)

    def forward(self, h_BTD: Tensor, modulation: Tensor, mask_B11T: Tensor) -> Tensor:
        """Return the tokens after this block; the mask is False where text is padding."""
        shift, scale, gate = modulation.chunk(_OF_SHARED, -1)
        asked, up = self.wide(modulate(h_BTD, shift, scale)).split(self.parts, -1)
        k, v, q = _normalised(asked, self.norms, self.heads)
        both = torch.cat([attend(q, k, v, mask_B11T), F.gelu(up)], dim=-1)
        return torch.addcmul(h_BTD, gate, self.narrow(both))


class HeadNorm(nn.Module):
    """A token's part in one head at root mean square 1, times a learned scale for each of its values."""

    def __init__(self, width: int, device: str | None = None) -> None:
        super().__init__()
        # Stored as the distance from 1, so that a fresh one is zero and weight decay pulls towards no scaling.
        self.scale = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, h: Tensor) -> Tensor:
        """Return the normalised values, same shape."""
        return F.rms_norm(h, h.shape[-1:], (1 + self.scale).to(h.dtype), eps=1e-6)


def _norms(width: int, num: int, device: str | None) -> nn.ModuleList:
    return nn.ModuleList(HeadNorm(width, device) for _ in range(num))


def _normalised(kvq: Tensor, norms: nn.ModuleList, heads: int) -> list[Tensor]:
    """Split keys, values and queries (if there are any), and normalise keys and queries in every head."""
    batch, tokens, _ = kvq.shape
    parts = list(kvq.reshape(batch, tokens, 1 + len(norms), heads, -1).permute(2, 0, 3, 1, 4))
    for place, norm in zip((0, 2), norms, strict=False):
        parts[place] = norm(parts[place])
    return parts
