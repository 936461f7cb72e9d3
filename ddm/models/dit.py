"""The diffusion transformer: predicts from a noised image, a time and, where conditional, a class or a text.

It differs from the original in four ways. One matrix product computes the modulations of all blocks, which depend only
on t and the class. The GELU is exact, on one CPU thread five times as fast as its tanh approximation. Positions are
computed, not stored. No variance is learned.
"""

# Shape legend: B batch, C channels, H height, W width, N tokens, M kept tokens, D hidden width, A attention heads.
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.conditions import ClassEmbedding, CrossAttention, TextEmbedding, TextTokens
from ddm.models.layers import (
    BLOCK_FORWARD,
    BLOCK_GRADIENT,
    MLP_RATIO,
    HeadNorm,
    attend,
    check_input,
    gather_tokens,
    images_of,
    initialise,
    modulate,
    outer_values,
    patches_of,
)
from ddm.models.network import Activations
from ddm.models.patch_transformer import PatchTransformer
from ddm.protocol.architecture import (
    ClassCondition,
    Condition,
    Dit,
    NoCondition,
    Shape,
    TextCondition,
)

# Shift, scale and gate, of attention and of the two-layer network.
_BLOCK_MODULATIONS = 6
# Kept for the gradient by the normalisation of queries and keys, and by cross-attention, in units of tokens x width.
_QK_NORM_GRADIENT = 4
_READER_GRADIENT = 8


class DitNetwork(PatchTransformer):
    """A diffusion transformer with adaLN-zero blocks.

    A class is added to the time; a text enters by cross-attention after each block's attention. A fresh model returns
    0 everywhere: the gates, the last layer and the output of cross-attention start at zero.

    Args:
        architecture: its sizes.
        shape: one image, (C, H, W).
        condition: the kind of condition that it takes.
        device: where the weights are created; on ``meta`` they have no memory, and the caller assigns them.

    Raises:
        ShapeError: the architecture does not fit the shape.

    Source:
        Peebles and Xie 2023, arXiv 2212.09748; for the text, Chen et al. 2023 (PixArt-alpha), arXiv 2310.00426.
    """

    def __init__(
        self,
        architecture: Dit,
        shape: Shape,
        condition: Condition = NoCondition(),
        device: str | None = None,
    ) -> None:
        super().__init__(architecture, shape, condition, device)
        self.architecture = architecture
        self.condition = condition
        hidden = architecture.hidden
        depth = architecture.depth
        self.modulation_widths = [_BLOCK_MODULATIONS * hidden] * depth + [2 * hidden]
        num_modulations = sum(self.modulation_widths)
        self.modulation = nn.Linear(hidden, num_modulations, device=device)
        reads_text = isinstance(condition, TextCondition)
        self.blocks = nn.ModuleList(
            DitBlock(architecture, device, reads_text=reads_text) for _ in range(depth)
        )
        self.head = nn.Linear(hidden, self.patch_values, device=device)
        self.classes = None
        if isinstance(condition, ClassCondition):
            self.classes = ClassEmbedding(condition, hidden, device)
        self.text = None
        if isinstance(condition, TextCondition):
            self.text = TextEmbedding(condition, hidden, device)

        zero_layers = [self.modulation, self.head]
        for module in self.modules():
            if isinstance(module, CrossAttention):
                zero_layers.append(module.project)
        initialise(self, self.time, zero_layers)
        self.widest_output = max(num_modulations, MLP_RATIO * hidden * self.num_tokens)

    def forward(
        self,
        x_BCHW: Tensor,
        t_B: Tensor,
        c: Tensor | None = None,
        *,
        kept_BM: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction at (x, t).

        Args:
            x_BCHW: noised images.
            t_B: times in [0, 1], shape (B,).
            c: classes (B,) or texts (B, L, D_text), see `ddm.models.conditions`; None for the null condition.
            kept_BM: numbers of the kept tokens, int64; None for all.

        Returns:
            Shape (B, C, H, W), velocity or eps by the objective; for kept tokens their patches only, (B, M, C P P).

        Raises:
            ShapeError: images of another shape than the model's, not one time per image, or a condition of another
                form than the model's.
        """
        tokens = self.tokens(x_BCHW, t_B, c, kept_BM)
        patches: Tensor = self.head(tokens)
        if kept_BM is not None:
            # Masked training compares patches; there is no whole image.
            return patches
        return images_of(patches, self.shape, self.patch)

    def tokens(
        self,
        x_BCHW: Tensor,
        t_B: Tensor,
        c: Tensor | None = None,
        kept_BM: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens that the head reads, shape (B, N, D) or (B, M, D); see `forward`."""
        check_input(x_BCHW, t_B, self.shape)
        if c is not None and self.classes is None and self.text is None:
            raise ShapeError(
                "condition",
                expected="no condition: the model is unconditional",
                got=f"a condition of shape {tuple(c.shape)}",
            )
        # `len` would fix the number of samples of a program that torch traces.
        num_samples = t_B.shape[0]
        condition_BD = self.time(t_B)
        if self.classes is not None:
            condition_BD = condition_BD + self.classes(c, num_samples)
        text = None
        if self.text is not None:
            text = self.text(c, num_samples)

        # One product for all blocks: their modulations depend on the time and the class alone.
        modulation_BM = self.modulation(F.silu(condition_BD))
        modulation_B1M = modulation_BM[:, None]
        *block_modulations, last = torch.split(modulation_B1M, self.modulation_widths, -1)
        h_BND = self.image_tokens(x_BCHW, kept_BM)
        for block, block_modulation in zip(self.blocks, block_modulations, strict=True):
            h_BND = block(h_BND, block_modulation, text)
        shift, scale = last.chunk(2, -1)
        return modulate(h_BND, shift, scale)

    def image_tokens(self, x_BCHW: Tensor, kept_BM: Tensor | None = None) -> Tensor:
        """Return the tokens that the first block reads, shape (B, N, D) or (B, M, D)."""
        patches = patches_of(x_BCHW, self.patch)
        position = self.position_ND
        if kept_BM is not None:
            patches = gather_tokens(patches, kept_BM)
            position = position[kept_BM]
        out: Tensor = self.embed(patches) + position
        return out

    def activations(self) -> Activations:
        """See `ExpertNetwork`."""
        hidden = self.architecture.hidden
        image_values = self.position_ND.numel()
        text_values = 0
        block_gradient = BLOCK_GRADIENT * image_values
        if self.architecture.qk_norm:
            block_gradient += _QK_NORM_GRADIENT * image_values
        if isinstance(self.condition, TextCondition):
            text_values = self.condition.max_tokens * hidden
            block_gradient += _READER_GRADIENT * image_values + 3 * text_values

        num_modulations = sum(self.modulation_widths)
        outside = outer_values(self.shape, self.condition) + 3 * text_values
        outside += 2 * num_modulations
        block_forward = BLOCK_FORWARD * (image_values + text_values)
        kept_by_all_blocks = self.architecture.depth * block_gradient
        return Activations(
            widest=image_values,
            forward=block_forward + outside,
            gradient=kept_by_all_blocks + 6 * image_values + outside,
        )


class DitBlock(nn.Module):
    """Self-attention, cross-attention to a text if there is one, and a two-layer network, on the residual stream."""

    def __init__(
        self,
        architecture: Dit,
        device: str | None = None,
        *,
        reads_text: bool = False,
    ) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.heads = architecture.heads
        self.qkv = nn.Linear(hidden, 3 * hidden, device=device)
        self.project = nn.Linear(hidden, hidden, device=device)
        self.up = nn.Linear(hidden, MLP_RATIO * hidden, device=device)
        self.down = nn.Linear(MLP_RATIO * hidden, hidden, device=device)
        self.norms = nn.ModuleList()
        if architecture.qk_norm:
            head_width = hidden // self.heads
            # Of the queries, and of the keys.
            self.norms.append(HeadNorm(head_width, device))
            self.norms.append(HeadNorm(head_width, device))
        self.reader = None
        if reads_text:
            self.reader = CrossAttention(hidden, self.heads, device)

    def forward(
        self,
        h_BND: Tensor,
        modulation: Tensor,
        text: TextTokens | None = None,
    ) -> Tensor:
        """Return the tokens after this block; `modulation` is its six (B, 1, D) parts side by side."""
        # Of attention (a), and of the two-layer network (m).
        parts = modulation.chunk(_BLOCK_MODULATIONS, -1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = parts
        attention_input = modulate(h_BND, shift_a, scale_a)
        h_BND = torch.addcmul(h_BND, gate_a, self._attend(attention_input))
        if self.reader is not None:
            # No gate: the reader's last layer starts at zero itself.
            h_BND = h_BND + self.reader(h_BND, text)
        network_input = modulate(h_BND, shift_m, scale_m)
        widened = F.gelu(self.up(network_input))
        return torch.addcmul(h_BND, gate_m, self.down(widened))

    def _attend(self, h_BND: Tensor) -> Tensor:
        batch, tokens, hidden = h_BND.shape
        head_width = hidden // self.heads
        side_by_side = self.qkv(h_BND)
        qkv = side_by_side.view(batch, tokens, 3, self.heads, head_width)
        q_BAND, k_BAND, v_BAND = qkv.permute(2, 0, 3, 1, 4)
        if len(self.norms):
            q_BAND = self.norms[0](q_BAND)
            k_BAND = self.norms[1](k_BAND)
        mixed_BND = attend(q_BAND, k_BAND, v_BAND)
        out: Tensor = self.project(mixed_BND)
        return out


NETWORK = DitNetwork
