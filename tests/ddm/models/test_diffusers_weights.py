"""Networks of diffusers and the same weights in ours: equal answers, with diffusers itself as the oracle."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm.errors import SetupError, TensorFileError
from ddm.models import build_expert
from ddm.models.base_weights import fit_base
from ddm.models.diffusers_weights import CONFIGS, DiffusersClass, weights_of
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)

SHAPE = (2, 8, 8)
CLASSES = ClassCondition(num_classes=3)
DIT = Dit(patch=2, hidden=24, depth=2, heads=2)
UNET = Unet(
    channels=(8, 16), attention=(False, True), num_res_blocks=1, head_channels=8, norm_groups=4
)
MMDIT = Mmdit(patch=2, hidden=24, depth=2, heads=2)
DIT_SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 2,
    "out_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 3,
    "norm_num_groups": 1,
    "activation_fn": "gelu",
}
UNET_SIZES = {
    "sample_size": 8,
    "in_channels": 2,
    "out_channels": 2,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "norm_eps": 1e-6,
}
SD3_SIZES = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 2,
    "out_channels": 2,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 6,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 5,
    "pos_embed_max_size": 4,
    "qk_norm": "rms_norm",
}


@pytest.fixture(scope="module")
def diffusers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(
            "diffusers", reason="needs diffusers: pip install '.[diffusers]'"
        )
        # Its classes are imported when they are first named.
        for name in CONFIGS:
            getattr(module, name)
        return module


def made(network_class: Any, **sizes: Any) -> nn.Module:
    """A network of diffusers with made weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network: nn.Module = network_class(**sizes)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=random))
    return network.eval()


def ours(
    layout: DiffusersClass, network: Any, architecture: Architecture, condition: Any
) -> nn.Module:
    config = CONFIGS[layout].model_validate_json(json.dumps(dict(network.config)))
    weights = weights_of(layout, config, network.state_dict(), architecture)
    fitted = fit_base(weights, architecture, SHAPE, condition)
    expert = build_expert(architecture, SHAPE, condition=condition)
    expert.load_state_dict(fitted.tensors)
    return expert.eval()


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([0.05, 0.3, 0.6, 0.95])


def share_blocks_embedding(network: Any) -> None:
    """Let all blocks have one embedding of time and class, as in published checkpoints, with DiT's own frequencies."""
    first = network.transformer_blocks[0].norm1.emb
    for block in network.transformer_blocks:
        block.norm1.emb.load_state_dict(first.state_dict())
        block.norm1.emb.time_proj.downscale_freq_shift = 0


@torch.no_grad()
def test_dit_of_diffusers_answers_as_ours_with_its_weights(diffusers: Any) -> None:
    theirs = made(diffusers.DiTTransformer2DModel, **DIT_SIZES)
    share_blocks_embedding(theirs)
    expert = ours("DiTTransformer2DModel", theirs, DIT, CLASSES)
    x, t = samples()
    # No class is the row after the last there.
    for own_classes, their_classes in (([0, 1, 2, 0], [0, 1, 2, 0]), ([-1] * 4, [3] * 4)):
        (answer,) = theirs(x, 1000 * t, torch.tensor(their_classes), return_dict=False)
        torch.testing.assert_close(
            expert(x, t, torch.tensor(own_classes)), answer[:, :2], atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
@pytest.mark.parametrize("flip", [True, False])
def test_unet_of_diffusers_answers_as_ours_with_its_weights(diffusers: Any, flip: bool) -> None:
    theirs = made(diffusers.UNet2DModel, **UNET_SIZES, flip_sin_to_cos=flip)
    expert = ours("UNet2DModel", theirs, UNET, NoCondition())
    x, t = samples()
    (answer,) = theirs(x, 1000 * t, return_dict=False)
    torch.testing.assert_close(expert(x, t), answer, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_transformer_of_sd3_without_its_text_answers_nearly_as_ours(diffusers: Any) -> None:
    """Text and pooled vector are zeroed on both sides, so that only what was taken over is compared."""
    theirs: Any = made(diffusers.SD3Transformer2DModel, **SD3_SIZES)
    theirs.time_text_embed.time_proj.downscale_freq_shift = 0
    for layer in (theirs.context_embedder, theirs.time_text_embed.text_embedder):
        for weight in layer.parameters():
            weight.zero_()
    expert: Any = ours("SD3Transformer2DModel", theirs, MMDIT, TextCondition(dim=6, max_tokens=1))
    for module in (expert.text, expert.pooled):
        for weight in module.parameters():
            weight.zero_()
    x, t = samples()
    (answer,) = theirs(x, torch.zeros(4, 1, 6), torch.zeros(4, 5), 1000 * t, return_dict=False)
    # Its network between blocks approximates the GELU by a tanh.
    torch.testing.assert_close(expert(x, t, torch.ones(4, 1, 6)), answer, atol=0.01, rtol=0.01)


def test_dit_whose_blocks_embed_times_differently_is_refused(diffusers: Any) -> None:
    theirs = made(diffusers.DiTTransformer2DModel, **DIT_SIZES)
    with pytest.raises(TensorFileError) as caught:
        ours("DiTTransformer2DModel", theirs, DIT, CLASSES)
    assert caught.value.subject.startswith("base, tensor transformer_blocks.1.norm1.emb.")


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (DIT.model_copy(update={"heads": 4}), "heads"),
        (DIT.model_copy(update={"patch": 4}), "patch"),
        (DIT.model_copy(update={"qk_norm": True}), "qk_norm"),
        (UNET, "kind"),
    ],
)
def test_architecture_that_differs_where_no_shape_shows_it_is_refused(
    diffusers: Any, architecture: Architecture, field: str
) -> None:
    theirs = made(diffusers.DiTTransformer2DModel, **DIT_SIZES)
    share_blocks_embedding(theirs)
    with pytest.raises(SetupError) as caught:
        ours("DiTTransformer2DModel", theirs, architecture, CLASSES)
    assert caught.value.subject == f"recipe, expert.architecture.{field}"


def test_tensor_without_a_counterpart_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["DiTTransformer2DModel"].model_validate(DIT_SIZES)
    with pytest.raises(TensorFileError) as caught:
        weights_of("DiTTransformer2DModel", config, {"other": torch.zeros(1)}, DIT)
    assert caught.value.subject == "base, tensor pos_embed.proj.weight"
