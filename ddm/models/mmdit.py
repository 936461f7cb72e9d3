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
    BLOCK_FORWARD,
    BLOCK_GRADIENT,
    MLP_RATIO,
    HeadNorm,
    attend,
    check_input,
    images_of,
    initialise,
    modulate,
    outer_values,
    patches_of,
)
from ddm.models.network import Activations
from ddm.models.patch_transformer import PatchTransformer
from ddm.protocol.architecture import Condition, Mmdit, Shape, TextCondition

# Modulations of a stream with its own output (shift, scale and gate, of attention and network), of one that only gives
# keys and values (shift and scale), and of a block whose weights both streams share (shift, scale and gate).
_STREAM_MODULATIONS = 6
_KEY_VALUE_MODULATIONS = 2
_SHARED_MODULATIONS = 3


class MmditNetwork(PatchTransformer):
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

    def __init__(
        self,
        architecture: Mmdit,
        shape: Shape,
        condition: Condition,
        device: str | None = None,
    ) -> None:
        super().__init__(architecture, shape, condition, device)
        if not isinstance(condition, TextCondition):
            raise ShapeError(
                "condition",
                expected="the kind text",
                got=f"the kind {condition.kind}",
            )
        self.architecture = architecture
        self.condition = condition
        hidden = architecture.hidden
        heads = architecture.heads
        self.text = TextEmbedding(condition, hidden, device)
        self.pooled = nn.Linear(hidden, hidden, device=device)

        num_joint = architecture.depth - architecture.shared_depth
        self.joint = nn.ModuleList()
        self.shared = nn.ModuleList()
        self.modulation_widths = []
        for index in range(num_joint):
            # Nothing uses the text tokens after the very last block, so that block does not compute them.
            updates_text = index + 1 < architecture.depth
            block = JointBlock(hidden, heads, updates_text, device)
            self.joint.append(block)
            self.modulation_widths.append(block.num_modulations * hidden)
        for _ in range(architecture.shared_depth):
            self.shared.append(SharedBlock(hidden, heads, device))
            self.modulation_widths.append(_SHARED_MODULATIONS * hidden)
        self.modulation_widths.append(2 * hidden)
        num_modulations = sum(self.modulation_widths)
        self.modulation = nn.Linear(hidden, num_modulations, device=device)
        self.head = nn.Linear(hidden, self.patch_values, device=device)
        initialise(self, self.time, [self.modulation, self.head])

        block_ratio = MLP_RATIO
        if architecture.shared_depth:
            # A shared block computes keys, values and queries in the same product as its network.
            block_ratio += 3
        num_all_tokens = self.num_tokens + condition.max_tokens
        widest_of_blocks = block_ratio * hidden * num_all_tokens
        self.widest_output = max(num_modulations, widest_of_blocks)

    def forward(
        self,
        x_BCHW: Tensor,
        t_B: Tensor,
        c_BLD: Tensor | None = None,
    ) -> Tensor:
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
        text = self.text(c_BLD, t_B.shape[0])
        condition_BD = self.time(t_B) + self.pooled(text.mean())
        modulation_BM = self.modulation(F.silu(condition_BD))
        # The same for all tokens of a sample.
        modulation_B1M = modulation_BM[:, None]
        modulations = torch.split(modulation_B1M, self.modulation_widths, -1)
        # Those of the joint blocks come first, then those of the shared ones, last those of the head.
        num_joint = len(self.joint)
        joint_modulations = modulations[:num_joint]
        shared_modulations = modulations[num_joint:-1]
        # Image tokens come first, and none of them is padding.
        mask_B11T = F.pad(text.mask_B11L, (self.num_tokens, 0), value=True)

        image_patches = patches_of(x_BCHW, self.patch)
        h_BND = self.embed(image_patches) + self.position_ND
        g_BLD = text.tokens_BLD
        for block, modulation in zip(self.joint, joint_modulations, strict=True):
            h_BND, g_BLD = block(h_BND, g_BLD, modulation, mask_B11T)
        if len(self.shared):
            h_BTD = torch.cat([h_BND, g_BLD], dim=1)
            for block, modulation in zip(self.shared, shared_modulations, strict=True):
                h_BTD = block(h_BTD, modulation, mask_B11T)
            h_BND = h_BTD[:, : self.num_tokens]

        shift, scale = modulations[-1].chunk(2, -1)
        output_patches = self.head(modulate(h_BND, shift, scale))
        return images_of(output_patches, self.shape, self.patch)

    def activations(self) -> Activations:
        """See `ExpertNetwork`."""
        hidden = self.architecture.hidden
        token_values = (self.num_tokens + self.condition.max_tokens) * hidden
        num_modulations = sum(self.modulation_widths)
        outside = outer_values(self.shape, self.condition) + 2 * num_modulations
        in_a_block = 2 * BLOCK_FORWARD * token_values
        # Beside what a block of one stream keeps for its gradient: the normalised queries and keys of both.
        kept_by_a_block = (BLOCK_GRADIENT + 8) * token_values
        kept_by_all_blocks = self.architecture.depth * kept_by_a_block
        return Activations(
            widest=token_values,
            forward=in_a_block + outside,
            gradient=kept_by_all_blocks + 8 * token_values + outside,
        )


class Stream(nn.Module):
    """The weights of one kind of token in a block.

    Args:
        hidden: width.
        heads: attention heads.
        is_updated: whether the block returns new tokens of this kind; otherwise they give keys and values only.
        device: where the weights are created.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        is_updated: bool,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        # Keys and values; queries as well where the tokens themselves attend.
        num_projections = 2
        if is_updated:
            num_projections = 3
        self.qkv = nn.Linear(hidden, num_projections * hidden, device=device)
        self.norms = _head_norms(hidden // heads, num_projections - 1, device)
        if is_updated:
            self.project = nn.Linear(hidden, hidden, device=device)
            self.up = nn.Linear(hidden, MLP_RATIO * hidden, device=device)
            self.down = nn.Linear(MLP_RATIO * hidden, hidden, device=device)

    def keys_values_queries(self, h_BTD: Tensor) -> list[Tensor]:
        """Return keys, values and, where tokens are updated, queries, each of shape (B, A, T, D / A)."""
        return _split_and_normalise(self.qkv(h_BTD), self.norms, self.heads)

    def update(
        self,
        h_BTD: Tensor,
        mixed_BTD: Tensor,
        modulation: tuple[Tensor, ...],
    ) -> Tensor:
        """Return the tokens after this block, from the output of attention and (gate, shift, scale, gate)."""
        attention_gate, shift, scale, network_gate = modulation
        h_BTD = torch.addcmul(h_BTD, attention_gate, self.project(mixed_BTD))
        modulated = modulate(h_BTD, shift, scale)
        widened = F.gelu(self.up(modulated))
        return torch.addcmul(h_BTD, network_gate, self.down(widened))


class JointBlock(nn.Module):
    """Joint attention over image and text tokens, with separate weights for each kind.

    Args:
        hidden: width.
        heads: attention heads.
        updates_text: whether it returns new text tokens.
        device: where the weights are created.

    Attributes:
        num_modulations: vectors that scale, shift and gate its tokens.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        updates_text: bool,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.image = Stream(hidden, heads, True, device)
        self.text = Stream(hidden, heads, updates_text, device)
        self.updates_text = updates_text
        text_modulations = _KEY_VALUE_MODULATIONS
        if updates_text:
            text_modulations = _STREAM_MODULATIONS
        self.num_modulations = _STREAM_MODULATIONS + text_modulations

    def forward(
        self,
        h_BND: Tensor,
        g_BLD: Tensor,
        modulation: Tensor,
        mask_B11T: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return image and text tokens after this block; the mask is False where text is padding."""
        parts = modulation.chunk(self.num_modulations, -1)
        shift_h, scale_h, *image_update = parts[:_STREAM_MODULATIONS]
        shift_g, scale_g, *text_update = parts[_STREAM_MODULATIONS:]
        modulated_h = modulate(h_BND, shift_h, scale_h)
        modulated_g = modulate(g_BLD, shift_g, scale_g)
        k_h, v_h, q_h = self.image.keys_values_queries(modulated_h)
        # There are no queries of the text where its tokens are not updated.
        k_g, v_g, *q_g = self.text.keys_values_queries(modulated_g)
        mixed_BTD = attend(
            torch.cat([q_h, *q_g], dim=2),
            torch.cat([k_h, k_g], dim=2),
            torch.cat([v_h, v_g], dim=2),
            mask_B11T,
        )
        # Views, so that nothing is copied.
        num_image_tokens = h_BND.shape[1]
        mixed_image = mixed_BTD[:, :num_image_tokens]
        mixed_text = mixed_BTD[:, num_image_tokens:]
        h_BND = self.image.update(h_BND, mixed_image, tuple(image_update))
        if self.updates_text:
            g_BLD = self.text.update(g_BLD, mixed_text, tuple(text_update))
        return h_BND, g_BLD


class SharedBlock(nn.Module):
    """Attention over both kinds of token and, in parallel, a two-layer network: two matrix products in all."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.wide_parts = [3 * hidden, MLP_RATIO * hidden]
        self.wide = nn.Linear(hidden, sum(self.wide_parts), device=device)
        self.norms = _head_norms(hidden // heads, 2, device)
        self.narrow = nn.Linear((1 + MLP_RATIO) * hidden, hidden, device=device)

    def forward(
        self,
        h_BTD: Tensor,
        modulation: Tensor,
        mask_B11T: Tensor,
    ) -> Tensor:
        """Return the tokens after this block; the mask is False where text is padding."""
        shift, scale, gate = modulation.chunk(_SHARED_MODULATIONS, -1)
        wide = self.wide(modulate(h_BTD, shift, scale))
        kvq, up = wide.split(self.wide_parts, -1)
        k, v, q = _split_and_normalise(kvq, self.norms, self.heads)
        mixed = attend(q, k, v, mask_B11T)
        both = torch.cat([mixed, F.gelu(up)], dim=-1)
        return torch.addcmul(h_BTD, gate, self.narrow(both))


def _head_norms(
    width: int,
    num: int,
    device: str | None,
) -> nn.ModuleList:
    return nn.ModuleList(HeadNorm(width, device) for _ in range(num))


def _split_and_normalise(
    kvq: Tensor,
    norms: nn.ModuleList,
    heads: int,
) -> list[Tensor]:
    """Split keys, values and queries (if there are any), and normalise keys and queries in every head.

    Args:
        kvq: their projections side by side, shape (B, T, 2 D) or (B, T, 3 D).
        norms: that of the keys and, if there are queries, that of the queries.
        heads: attention heads.
    """
    # Keys come first, so that they have one place with and without queries. Values are not normalised.
    batch, tokens, _ = kvq.shape
    num_projections = 1 + len(norms)
    split = kvq.reshape(batch, tokens, num_projections, heads, -1)
    by_projection = split.permute(2, 0, 3, 1, 4)
    keys, values, *queries = by_projection
    parts = [norms[0](keys), values]
    for query in queries:
        parts.append(norms[1](query))
    return parts


NETWORK = MmditNetwork
