"""Our DiT and diffusers' `DiTTransformer2DModel` answer alike with the same made weights."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm.models import build_expert
from ddm.protocol.architecture import ClassCondition, Dit

DIT = Dit(patch=2, hidden=32, depth=3, heads=4)
SHAPE = (3, 8, 8)
CLASSES = 5


def diffusers_dit() -> Any:
    """Diffusers' network with made weights, in evaluation, every block with the same embedding of time and class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")
        from diffusers import DiTTransformer2DModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = DiTTransformer2DModel(
            num_attention_heads=DIT.heads,
            attention_head_dim=DIT.hidden // DIT.heads,
            in_channels=SHAPE[0],
            num_layers=DIT.depth,
            sample_size=SHAPE[1],
            patch_size=DIT.patch,
            activation_fn="gelu",
            num_embeds_ada_norm=CLASSES,
            norm_eps=1e-6,
        ).eval()
        for weight in net.parameters():
            nn.init.normal_(weight, std=0.2)
    shared = net.transformer_blocks[0].norm1.emb.state_dict()
    for block in net.transformer_blocks:
        block.norm1.emb.load_state_dict(shared)
    return net


def ours_of(net: Any) -> nn.Module:
    """Our network with the same weights, and with diffusers' frequencies of time and order of positions."""
    ours: Any = build_expert(DIT, SHAPE, condition=ClassCondition(num_classes=CLASSES)).eval()
    theirs = dict(net.state_dict())
    weights = dict[str, Tensor]()
    patch = DIT.patch
    hidden = DIT.hidden
    weights["embed.weight"] = theirs["pos_embed.proj.weight"].flatten(1)
    weights["embed.bias"] = theirs["pos_embed.proj.bias"]
    by_channel = (
        torch.arange(patch * patch * SHAPE[0])
        .view(patch, patch, SHAPE[0])
        .permute(2, 0, 1)
        .flatten()
    )
    time = "transformer_blocks.0.norm1.emb"
    modulations = [f"transformer_blocks.{n}.norm1.linear" for n in range(DIT.depth)] + [
        "proj_out_1"
    ]
    for kind in ("weight", "bias"):
        weights[f"head.{kind}"] = theirs[f"proj_out_2.{kind}"][by_channel]
        weights[f"time.mlp.0.{kind}"] = theirs[f"{time}.timestep_embedder.linear_1.{kind}"]
        weights[f"time.mlp.2.{kind}"] = theirs[f"{time}.timestep_embedder.linear_2.{kind}"]
        weights[f"modulation.{kind}"] = torch.cat(
            [theirs[f"{name}.{kind}"] for name in modulations]
        )
        for n in range(DIT.depth):
            block = f"transformer_blocks.{n}"
            weights[f"blocks.{n}.qkv.{kind}"] = torch.cat(
                [theirs[f"{block}.attn1.to_{part}.{kind}"] for part in "qkv"]
            )
            weights[f"blocks.{n}.project.{kind}"] = theirs[f"{block}.attn1.to_out.0.{kind}"]
            weights[f"blocks.{n}.up.{kind}"] = theirs[f"{block}.ff.net.0.proj.{kind}"]
            weights[f"blocks.{n}.down.{kind}"] = theirs[f"{block}.ff.net.2.{kind}"]
    weights["classes.table.weight"] = theirs[f"{time}.class_embedder.embedding_table.weight"].roll(
        1, 0
    )
    ours.load_state_dict(weights)
    # Diffusers' largest period is reached by the last frequency, and its columns come before its rows.
    half = len(ours.time.frequencies)
    ours.time.frequencies.copy_(
        1000 * torch.exp(-math.log(10_000) * torch.arange(half) / (half - 1))
    )
    positions = net.pos_embed.pos_embed[0]
    torch.testing.assert_close(ours.position_ND, positions.roll(hidden // 2, 1), rtol=0, atol=1e-5)
    ours.position_ND.copy_(positions)
    return ours  # type: ignore[no-any-return]


def test_dit_answers_as_diffusers_does_with_the_same_weights() -> None:
    net = diffusers_dit()
    ours = ours_of(net)
    x_B = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    t_B = torch.tensor([0.0, 0.3, 0.71, 1.0])
    c_B = torch.tensor([0, 4, 2, -1])
    with torch.no_grad():
        theirs = net(x_B, 1000 * t_B, torch.where(c_B < 0, CLASSES, c_B), return_dict=False)[0]
        scale = float(theirs.abs().max())
        assert (ours(x_B, t_B, c_B) - theirs).abs().max() < 1e-4 * scale
        assert (ours(x_B, t_B, c_B.roll(1)) - theirs).abs().max() > 0.01 * scale, "other classes"
        assert (ours(x_B, t_B.flip(0), c_B) - theirs).abs().max() > 0.01 * scale, "other times"


def test_dit_has_as_many_weights_as_diffusers_but_for_the_embeddings_that_every_block_repeats() -> (
    None
):
    net = diffusers_dit()
    ours = build_expert(DIT, SHAPE, condition=ClassCondition(num_classes=CLASSES))
    repeated = sum(
        parameter.numel() for parameter in net.transformer_blocks[0].norm1.emb.parameters()
    ) * (DIT.depth - 1)
    assert sum(parameter.numel() for parameter in net.parameters()) - repeated == sum(
        parameter.numel() for parameter in ours.parameters()
    )
