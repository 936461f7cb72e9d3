"""Layers shared by the transformers: patches, positions, times, modulation, attention, initial weights."""

# Shape legend: B batch, C channels, H height, W width, N tokens, D hidden width, A attention heads, P patch.
from collections.abc import Sequence
from math import inf, log, prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.protocol.architecture import Architecture, Condition, GridSize, Shape, TextCondition

TIME_FEATURES = 256
MLP_RATIO = 4

# Values that a transformer's block holds, in units of tokens x width (`ddm.models.network.Activations`). They were
# found by measurement; tests/ddm/test_footprint.py holds them to the allocator's own account.
BLOCK_FORWARD = 18
BLOCK_GRADIENT = 26

_MAX_TOKENS_PER_VALUE = 8


class TimeEmbedding(nn.Module):
    """Sines and cosines of 1000 t at 128 frequencies, then a two-layer network."""

    frequencies: Tensor

    def __init__(self, hidden: int, device: str | None = None) -> None:
        super().__init__()
        half = TIME_FEATURES // 2
        # On the meta device torch would import its compiler for it, which takes a second.
        numbers = torch.arange(half, device="cpu")
        exponents = -log(10_000.0) * numbers / half
        frequencies = 1000.0 * torch.exp(exponents)
        frequencies = frequencies.to(torch.get_default_device())
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.mlp = nn.Sequential(
            nn.Linear(TIME_FEATURES, hidden, device=device),
            nn.SiLU(),
            nn.Linear(hidden, hidden, device=device),
        )

    def forward(self, t_B: Tensor) -> Tensor:
        """Return one vector of the hidden width per time."""
        angle = t_B[:, None] * self.frequencies
        cosines = torch.cos(angle)
        sines = torch.sin(angle)
        waves = torch.cat([cosines, sines], dim=-1)
        out: Tensor = self.mlp(waves)
        return out


def check_fit(
    architecture: Architecture,
    shape: Shape,
    condition: Condition,
) -> None:
    """Refuse an architecture that does not fit the shape or the condition.

    Raises:
        ShapeError: it does not.
    """
    misfit = architecture.misfit(shape, condition)
    if misfit:
        raise ShapeError(
            f"architecture {architecture.kind}",
            expected=misfit,
            got=f"shape {shape}, condition {condition.kind}",
        )


def check_input(
    x_B: Tensor,
    t_B: Tensor,
    shape: Shape,
) -> None:
    """Refuse samples of another shape than the model's, or not one time per sample.

    Raises:
        ShapeError: on either.
    """
    has_shape = tuple(x_B.shape[1:]) == shape
    has_time_per_sample = t_B.shape == x_B.shape[:1]
    if not has_shape or not has_time_per_sample:
        sides = ", ".join(map(str, shape))
        raise ShapeError(
            "model input",
            expected=f"samples (B, {sides}) and times (B,)",
            got=f"samples {tuple(x_B.shape)} and times {tuple(t_B.shape)}",
        )


def initialise(
    model: nn.Module,
    time: TimeEmbedding,
    zero_layers: Sequence[nn.Linear],
) -> None:
    """Initialise all linear layers (Glorot), those of the time with smaller values, and `zero_layers` with zero."""
    if any(parameter.is_meta for parameter in time.parameters()):
        # There is nothing to fill, and random numbers on that device make torch import its compiler, for a second.
        return
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    # After all others, among which those of the time are.
    for module in time.mlp:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    # A block whose gates are zero is the identity, from which deep networks train well (Peebles and Xie 2023).
    for layer in zero_layers:
        nn.init.zeros_(layer.weight)


def patches_of(x_BCHW: Tensor, patch: int) -> Tensor:
    """Cut images into square patches, row by row, shape (B, N, C P P)."""
    _, channels, height, width = x_BCHW.shape
    rows = height // patch
    columns = width // patch
    split = x_BCHW.reshape(-1, channels, rows, patch, columns, patch)
    # Rows and columns of patches first, then what is within a patch: channels and pixels.
    by_place = split.permute(0, 2, 4, 1, 3, 5)
    num_patches = rows * columns
    values_per_patch = channels * patch * patch
    return by_place.reshape(-1, num_patches, values_per_patch)


def gather_tokens(h_BND: Tensor, kept_BM: Tensor) -> Tensor:
    """Return some of each sample's tokens by their indices, shape (B, M, D)."""
    hidden = h_BND.shape[-1]
    # Each index once for every value of a token.
    index_BMD = kept_BM[..., None].expand(-1, -1, hidden)
    return h_BND.gather(1, index_BMD)


def images_of(
    p_BND: Tensor,
    shape: Shape,
    patch: int,
) -> Tensor:
    """Join patches into images, the inverse of `patches_of`."""
    channels, height, width = shape
    rows = height // patch
    columns = width // patch
    split = p_BND.reshape(-1, rows, columns, channels, patch, patch)
    # To channel, then row of patches and row within the patch, then the same for columns.
    by_channel = split.permute(0, 3, 1, 4, 2, 5)
    return by_channel.reshape(-1, channels, height, width)


def sincos_positions(
    rows: int,
    columns: int,
    hidden: int,
    grid: GridSize | None = None,
) -> Tensor:
    """Fixed position embeddings of a grid: half of the features encode the row, half the column.

    Args:
        rows: R.
        columns: S.
        hidden: width of an embedding.
        grid: rows G and columns H of the grid on which the network was trained first: row r is placed at ``r G / R``,
            column s at ``s H / S``, between the places known to it. None places them at r and s.

    Returns:
        Shape (rows * columns, hidden), float32, not trained; a remainder modulo 4 is zero.

    Source:
        For the places, Chen et al. 2024 (PixArt-sigma), arXiv 2403.04692, section 3.3.
    """
    if torch.get_default_device().type == "meta":
        # Only the size counts; to compute on that device makes torch import its compiler, for a second.
        return torch.empty(rows * columns, hidden)
    quarter = hidden // 4
    numbers = torch.arange(quarter)
    exponents = -log(10_000.0) * numbers / max(quarter, 1)
    frequencies = torch.exp(exponents)
    # Places beyond the trained range would give features that the network has never seen.
    known_rows, known_columns = grid or (rows, columns)
    row_places = torch.arange(rows) * (known_rows / rows)
    column_places = torch.arange(columns) * (known_columns / columns)

    waves = []
    for place in torch.meshgrid(row_places, column_places, indexing="ij"):
        angle = place.reshape(-1, 1) * frequencies
        waves.append(torch.sin(angle))
        waves.append(torch.cos(angle))
    positions = torch.cat(waves, dim=-1)
    remainder = hidden - 4 * quarter
    return F.pad(positions, (0, remainder))


def normalise(h_BND: Tensor) -> Tensor:
    """Return every token with mean 0 and variance 1."""
    width = h_BND.shape[-1:]
    return F.layer_norm(h_BND, width, eps=1e-6)


def modulate(
    h_BND: Tensor,
    shift: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return every token normalised, then scaled and shifted; `shift` and `scale` have shape (B, 1, D)."""
    # A scale of 0 leaves tokens as they are, so that a fresh network begins there.
    factor = 1 + scale
    return torch.addcmul(shift, normalise(h_BND), factor)


class HeadNorm(nn.Module):
    """RMS normalisation of a token within one head, times a learned scale for each value."""

    def __init__(self, width: int, device: str | None = None) -> None:
        super().__init__()
        # Stored as the difference from 1, so that it starts at zero and weight decay pulls the scale towards 1.
        self.scale = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, h: Tensor) -> Tensor:
        """Return the normalised values, same shape."""
        # In full precision first: near 1, bf16 has steps of 1/128.
        scale = 1 + self.scale
        width = h.shape[-1:]
        return F.rms_norm(h, width, scale.to(h.dtype), eps=1e-6)


def heads_of(h_BND: Tensor, heads: int) -> Tensor:
    """Split the width among heads, shape (B, A, N, D / A)."""
    batch, tokens, hidden = h_BND.shape
    head_width = hidden // heads
    split = h_BND.view(batch, tokens, heads, head_width)
    return split.transpose(1, 2)


def attend(
    q_BAND: Tensor,
    k_BAND: Tensor,
    v_BAND: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend, and concatenate the heads again, shape (B, N, D); `mask` is False for tokens to ignore.

    Torch's fused attention is fast everywhere but in training in bf16 on a CPU, where its backward pass is slow. There
    products written out are one and a half to five times as fast, up to about eight tokens for each number of a head
    (`examples/benchmarks/attention.py`). What they keep for the gradient is then less than a block keeps besides. With
    more tokens float32 is up to twice as fast in narrow heads, and as fast in wide ones.
    """
    num_tokens = k_BAND.shape[-2]
    head_width = q_BAND.shape[-1]
    if not _trains_in_bf16_on_a_cpu(q_BAND):
        mixed = F.scaled_dot_product_attention(q_BAND, k_BAND, v_BAND, attn_mask=mask)
    elif num_tokens <= _MAX_TOKENS_PER_VALUE * head_width:
        scaled_q = q_BAND * head_width**-0.5
        scores = scaled_q @ k_BAND.transpose(-1, -2)
        if mask is not None:
            # Softmax gives these exactly 0.
            scores = scores.masked_fill(~mask, -inf)
        mixed = torch.softmax(scores, -1) @ v_BAND
    else:
        mixed_float32 = F.scaled_dot_product_attention(
            q_BAND.float(),
            k_BAND.float(),
            v_BAND.float(),
            attn_mask=mask,
        )
        mixed = mixed_float32.to(q_BAND.dtype)
    # Heads side by side again, token by token.
    return mixed.transpose(1, 2).flatten(2)


def _trains_in_bf16_on_a_cpu(q_BAND: Tensor) -> bool:
    is_bf16 = q_BAND.dtype == torch.bfloat16
    on_cpu = q_BAND.device.type == "cpu"
    trains = q_BAND.requires_grad and torch.is_grad_enabled()
    return is_bf16 and on_cpu and trains


def outer_values(shape: Shape, condition: Condition) -> int:
    """Return the values of a sample, its condition, and what is computed from them around the network."""
    text_values = 0
    if isinstance(condition, TextCondition):
        text_values = condition.max_tokens * condition.dim
    return 8 * prod(shape) + 2 * text_values
