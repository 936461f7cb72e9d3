"""Builds comparable models of the same size: diffusers' model, and the reference design on timm blocks.

diffusers is no dependency of this project: `pip install -r examples/benchmarks/requirements.txt`.
"""

# Shape legend: B batch, C channels, H height, W width, N tokens, D hidden width.
import math
import warnings

import torch
from torch import Tensor, nn

from ddm.encoders.timm import create_model
from ddm.protocol.architecture import Dit

NUM_CLASSES = 10


class Peer(nn.Module):
    """A peer, called as ours is: images, times in [0, 1], classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        """Answer as many channels as there are in the image."""
        answer: Tensor = self.model(x_BCHW, t_B, c_B)
        return answer


def diffusers_dit(architecture: Dit, shape: tuple[int, int, int]) -> nn.Module | None:
    """Diffusers' `DiTTransformer2DModel`; None where diffusers is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from diffusers import DiTTransformer2DModel
    except ImportError:
        return None
    model = DiTTransformer2DModel(
        num_attention_heads=architecture.heads,
        attention_head_dim=architecture.hidden // architecture.heads,
        in_channels=shape[0],
        out_channels=shape[0],
        num_layers=architecture.depth,
        sample_size=shape[1],
        patch_size=architecture.patch,
        num_embeds_ada_norm=NUM_CLASSES,
    )

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x_BCHW: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
            out: Tensor = self.inner(x_BCHW, 1000 * t_B, c_B, return_dict=False)[0]
            return out

    return Peer(Called())


class ReferenceBlock(nn.Module):
    """A block as published: timm's attention and network, modulations made in the block."""

    def __init__(self, hidden: int, heads: int) -> None:
        from timm.layers import Mlp
        from timm.models.vision_transformer import Attention

        super().__init__()
        self.norms = nn.ModuleList(
            nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.attention = Attention(hidden, num_heads=heads, qkv_bias=True)
        self.network = Mlp(hidden, 4 * hidden, act_layer=lambda: nn.GELU(approximate="tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, h_BND: Tensor, c_BD: Tensor) -> Tensor:
        """Return the tokens after this block."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(c_BD)[:, None].chunk(
            6, -1
        )
        h_BND = h_BND + gate_a * self.attention(self.norms[0](h_BND) * (1 + scale_a) + shift_a)
        out: Tensor = h_BND + gate_m * self.network(self.norms[1](h_BND) * (1 + scale_m) + shift_m)
        return out


class ReferenceDit(nn.Module):
    """The design of Peebles and Xie 2023, on timm's blocks."""

    position_ND: Tensor
    frequencies: Tensor

    def __init__(self, architecture: Dit, shape: tuple[int, int, int]) -> None:
        from timm.layers import PatchEmbed

        super().__init__()
        (channels, height, _), patch, hidden = shape, architecture.patch, architecture.hidden
        self.shape = shape
        self.patch = patch
        self.embed = PatchEmbed(height, patch, channels, hidden)
        self.register_buffer("position_ND", torch.randn(self.embed.num_patches, hidden) * 0.02)
        self.register_buffer(
            "frequencies", 1000 * torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        )
        self.time = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.classes = nn.Embedding(NUM_CLASSES + 1, hidden)
        self.blocks = nn.ModuleList(
            ReferenceBlock(hidden, architecture.heads) for _ in range(architecture.depth)
        )
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.head = nn.Linear(hidden, channels * patch * patch)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        """Answer as many channels as there are in the image."""
        h_BND = self.embed(x_BCHW) + self.position_ND
        angle = t_B[:, None] * self.frequencies
        c_BD = self.time(torch.cat([torch.cos(angle), torch.sin(angle)], -1)) + self.classes(c_B)
        for block in self.blocks:
            h_BND = block(h_BND, c_BD)
        shift, scale = self.modulation(c_BD)[:, None].chunk(2, -1)
        p_BND = self.head(self.norm(h_BND) * (1 + scale) + shift)
        (channels, height, width), patch = self.shape, self.patch
        split = p_BND.reshape(-1, height // patch, width // patch, patch, patch, channels)
        unpatched: Tensor = split.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, height, width)
        return unpatched


def reference_dit(architecture: Dit, shape: tuple[int, int, int]) -> nn.Module:
    """The reference design on timm's blocks."""
    create_model("test_vit")
    return Peer(ReferenceDit(architecture, shape))
