"""Networks of diffusers and the same weights in ours: equal answers, with diffusers itself as the oracle."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm.errors import SetupError, TensorFileError
from ddm.models import build_expert
from ddm.models.base_weights import fit_base
from ddm.models.diffusers_configs import CONFIGS, DiffusersClass, parse_config
from ddm.models.diffusers_weights import weights_of
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
    name, config = parse_config({**network.config, "_class_name": layout})
    weights = weights_of(name, config, network.state_dict(), architecture)
    if weights.shape is not None:
        grid = architecture.position_span(weights.shape)
        if grid is not None:
            architecture = architecture.spanning(grid, SHAPE)
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


def without_text(theirs: Any) -> tuple[nn.Module, Tensor]:
    """Return ours with the weights of an SD3, neither reading texts, and the answer of the SD3 to the samples."""
    for layer in (theirs.context_embedder, theirs.time_text_embed.text_embedder):
        for weight in layer.parameters():
            weight.zero_()
    expert: Any = ours("SD3Transformer2DModel", theirs, MMDIT, TextCondition(dim=6, max_tokens=1))
    for module in (expert.text, expert.pooled):
        for weight in module.parameters():
            weight.zero_()
    x, t = samples()
    (answer,) = theirs(x, torch.zeros(4, 1, 6), torch.zeros(4, 5), 1000 * t, return_dict=False)
    return expert, answer


@torch.no_grad()
def test_transformer_of_sd3_without_its_text_answers_nearly_as_ours(diffusers: Any) -> None:
    """Text and pooled vector are zeroed on both sides, so that only what was taken over is compared."""
    theirs = made(diffusers.SD3Transformer2DModel, **SD3_SIZES)
    x, t = samples()
    expert, answer = without_text(theirs)
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
    _, config = parse_config({**DIT_SIZES, "_class_name": "DiTTransformer2DModel"})
    with pytest.raises(TensorFileError) as caught:
        weights_of("DiTTransformer2DModel", config, {"other": torch.zeros(1)}, DIT)
    assert caught.value.subject == "base, tensor pos_embed.proj.weight"


# Of every argument of a network of diffusers another value than that of the sizes above, and the field of the refusal;
# None where the answers stay equal. `heads`, `patch` and such are fields of the plan's architecture.
OTHER_VALUES: dict[DiffusersClass, list[tuple[str, Any, str | None]]] = {
    "UNet2DModel": [
        ("sample_size", (8, 16), None),
        ("in_channels", 1, "out_channels"),
        ("out_channels", 4, "out_channels"),
        ("center_input_sample", True, "center_input_sample"),
        ("time_embedding_type", "fourier", "time_embedding_type"),
        ("time_embedding_dim", 16, "time_embedding_dim"),
        ("time_embedding_dim", 32, None),
        ("freq_shift", 1, "freq_shift"),
        ("flip_sin_to_cos", False, None),
        ("down_block_types", ("AttnDownBlock2D", "AttnDownBlock2D"), "attention"),
        ("down_block_types", ("ResnetDownsampleBlock2D", "AttnDownBlock2D"), "down_block_types"),
        ("mid_block_type", None, "mid_block_type"),
        ("up_block_types", ("AttnUpBlock2D", "AttnUpBlock2D"), "up_block_types"),
        ("block_out_channels", (16, 16), "channels"),
        ("layers_per_block", 2, "num_res_blocks"),
        ("mid_block_scale_factor", 2.0, "mid_block_scale_factor"),
        ("downsample_padding", 0, "downsample_padding"),
        ("downsample_type", "resnet", "downsample_type"),
        ("upsample_type", "resnet", "upsample_type"),
        ("dropout", 0.5, None),
        ("act_fn", "swish", None),
        ("act_fn", "gelu", "act_fn"),
        ("attention_head_dim", 4, "head_channels"),
        ("attention_head_dim", None, "head_channels"),
        ("norm_num_groups", 2, "norm_groups"),
        ("attn_norm_num_groups", 2, "attn_norm_num_groups"),
        ("norm_eps", 1e-5, None),
        ("norm_eps", 1e-2, "norm_eps"),
        ("resnet_time_scale_shift", "scale_shift", "resnet_time_scale_shift"),
        ("add_attention", False, "add_attention"),
        ("class_embed_type", "timestep", "class_embed_type"),
        ("num_class_embeds", 3, None),
        ("num_train_timesteps", 500, None),
    ],
    "DiTTransformer2DModel": [
        ("num_attention_heads", 4, "heads"),
        ("attention_head_dim", 16, "hidden"),
        ("in_channels", 3, "out_channels"),
        ("out_channels", 3, "out_channels"),
        ("out_channels", None, None),
        ("num_layers", 3, "depth"),
        ("dropout", 0.5, None),
        ("norm_num_groups", 2, None),
        ("attention_bias", False, "attention_bias"),
        ("sample_size", 4, None),
        ("patch_size", 4, "patch"),
        ("activation_fn", "geglu", "activation_fn"),
        ("num_embeds_ada_norm", 2, None),
        ("upcast_attention", True, None),
        ("norm_type", "ada_norm", "norm_type"),
        ("norm_elementwise_affine", True, "norm_elementwise_affine"),
        ("norm_eps", 1e-6, None),
        ("norm_eps", 1e-2, "norm_eps"),
    ],
    "SD3Transformer2DModel": [
        ("patch_size", 4, "patch"),
        ("in_channels", 3, "out_channels"),
        ("num_layers", 3, "depth"),
        ("attention_head_dim", 16, "hidden"),
        ("num_attention_heads", 4, "heads"),
        ("out_channels", 4, "out_channels"),
        ("out_channels", None, None),
        ("dual_attention_layers", (0,), "dual_attention_layers"),
        ("qk_norm", None, "qk_norm"),
    ],
}
SIZES = {
    "UNet2DModel": UNET_SIZES,
    "DiTTransformer2DModel": DIT_SIZES,
    "SD3Transformer2DModel": SD3_SIZES,
}
ARCHITECTURES: dict[DiffusersClass, Architecture] = {
    "UNet2DModel": UNET,
    "DiTTransformer2DModel": DIT,
    "SD3Transformer2DModel": MMDIT,
}
# Of an SD3, parts that a plan replaces.
REPLACED_FIELDS = {
    "sample_size",
    "joint_attention_dim",
    "caption_projection_dim",
    "pooled_projection_dim",
    "pos_embed_max_size",
}


def converted_values() -> list[tuple[DiffusersClass, str, Any]]:
    return [
        (layout, field, value)
        for layout, rows in OTHER_VALUES.items()
        for field, value, refused in rows
        if refused is None
    ]


def refused_values() -> list[tuple[DiffusersClass, str, Any, str]]:
    return [
        (layout, field, value, refused)
        for layout, rows in OTHER_VALUES.items()
        for field, value, refused in rows
        if refused is not None
    ]


@pytest.mark.parametrize("layout", OTHER_VALUES)
def test_every_argument_of_a_network_of_diffusers_is_known_by_its_default(
    diffusers: Any, layout: DiffusersClass
) -> None:
    parameters = dict(inspect.signature(getattr(diffusers, layout).__init__).parameters)
    parameters.pop("self")
    fields = CONFIGS[layout].model_fields
    tried = {field for field, _, _ in OTHER_VALUES[layout]}
    if layout == "SD3Transformer2DModel":
        tried |= REPLACED_FIELDS
    assert set(fields) == set(parameters) == tried
    for name, parameter in parameters.items():
        # The default of diffusers, no normalisation, has no counterpart here.
        if name != "qk_norm":
            assert fields[name].default == parameter.default, name


@torch.no_grad()
@pytest.mark.parametrize(("layout", "field", "value"), converted_values())
def test_network_with_another_value_of_a_field_answers_as_ours(
    diffusers: Any, layout: DiffusersClass, field: str, value: Any
) -> None:
    theirs: Any = made(getattr(diffusers, layout), **{**SIZES[layout], field: value})
    x, t = samples()
    if layout == "SD3Transformer2DModel":
        expert, answer = without_text(theirs)
        torch.testing.assert_close(expert(x, t, torch.ones(4, 1, 6)), answer, atol=0.01, rtol=0.01)
        return
    if layout == "DiTTransformer2DModel":
        share_blocks_embedding(theirs)
        num_classes = theirs.config.num_embeds_ada_norm
    else:
        num_classes = theirs.config.num_class_embeds
    condition: Any = NoCondition()
    arguments = []
    if num_classes is not None:
        condition = ClassCondition(num_classes=num_classes)
        arguments = [torch.tensor([0, 1, 1, 0])]
    expert = ours(layout, theirs, ARCHITECTURES[layout], condition)
    (answer,) = theirs(x, 1000 * t, *arguments, return_dict=False)
    torch.testing.assert_close(expert(x, t, *arguments), answer[:, :2], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("layout", "field", "value", "refused"), refused_values())
def test_value_that_our_network_cannot_have_is_refused_by_its_field(
    diffusers: Any, layout: DiffusersClass, field: str, value: Any, refused: str
) -> None:
    sizes = {**SIZES[layout], field: value}
    with pytest.raises(SetupError) as caught:
        parse_config({**sizes, "_class_name": layout})
        # What several fields decide shows when the weights are converted.
        theirs: Any = made(getattr(diffusers, layout), **sizes)
        if layout == "DiTTransformer2DModel":
            share_blocks_embedding(theirs)
        ours(layout, theirs, ARCHITECTURES[layout], CLASSES)
    assert caught.value.subject in (
        f"base, config.json, {refused}",
        f"recipe, expert.architecture.{refused}",
    )
    assert caught.value.expected and caught.value.got


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("sample_size", 4, "positions"),
        ("pos_embed_max_size", 8, "positions"),
        ("joint_attention_dim", 7, "text"),
        ("caption_projection_dim", 12, "text"),
        ("pooled_projection_dim", 7, "text"),
    ],
)
def test_part_of_an_sd3_that_is_replaced_is_stated(
    diffusers: Any, field: str, value: Any, part: str
) -> None:
    theirs: Any = made(diffusers.SD3Transformer2DModel, **{**SD3_SIZES, field: value})
    layout, config = parse_config({**theirs.config, "_class_name": "SD3Transformer2DModel"})
    notes = weights_of(layout, config, theirs.state_dict(), MMDIT).notes
    assert any(part in note for note in notes)


@torch.no_grad()
def test_vector_of_no_class_that_a_unet_lacks_is_the_mean_of_its_classes_and_is_stated(
    diffusers: Any,
) -> None:
    theirs: Any = made(diffusers.UNet2DModel, **UNET_SIZES, num_class_embeds=3)
    layout, config = parse_config({**theirs.config, "_class_name": "UNet2DModel"})
    weights = weights_of(layout, config, theirs.state_dict(), UNET)
    # A plan with classes, and one without: the base then answers as for this vector.
    for condition in (CLASSES, NoCondition()):
        (note, *_) = fit_base(weights, UNET, SHAPE, condition).changes
        assert note.startswith("no class added, as the mean of its 3 classes")
    table_KD = weights.tensors["net.class_embedding.weight"]
    torch.testing.assert_close(table_KD[0], theirs.class_embedding.weight.mean(0))
    # The control: there is nothing to state of one without classes.
    theirs = made(diffusers.UNet2DModel, **UNET_SIZES)
    layout, config = parse_config({**theirs.config, "_class_name": "UNet2DModel"})
    assert weights_of(layout, config, theirs.state_dict(), UNET).notes == ()


def test_one_head_per_level_is_converted_when_the_levels_with_attention_have_one_width(
    diffusers: Any,
) -> None:
    theirs: Any = made(diffusers.UNet2DModel, **{**UNET_SIZES, "attention_head_dim": None})
    expert = ours(
        "UNet2DModel", theirs, UNET.model_copy(update={"head_channels": 16}), NoCondition()
    )
    x, t = samples()
    with torch.no_grad():
        (answer,) = theirs(x, 1000 * t, return_dict=False)
        torch.testing.assert_close(expert(x, t), answer, atol=1e-4, rtol=1e-3)

    both_levels = {
        "down_block_types": ("AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D"),
        "attention_head_dim": None,
    }
    theirs = made(diffusers.UNet2DModel, **{**UNET_SIZES, **both_levels})
    with pytest.raises(SetupError) as caught:
        ours(
            "UNet2DModel",
            theirs,
            UNET.model_copy(update={"attention": (True, True)}),
            NoCondition(),
        )
    assert caught.value.subject == "base, config.json, attention_head_dim"


def test_field_that_nobody_knows_is_refused() -> None:
    known = {**UNET_SIZES, "_class_name": "UNet2DModel", "_diffusers_version": "0.39.0"}
    # Those of a moving average of the weights change no answer.
    parse_config({**known, "decay": 0.9999, "use_ema_warmup": True})
    with pytest.raises(SetupError) as caught:
        parse_config({**known, "attention_scale": 2})
    assert caught.value.subject == "base, config.json, attention_scale"


def test_dit_that_was_saved_as_the_general_transformer_is_read_as_a_dit() -> None:
    old = {**DIT_SIZES, "_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero"}
    layout, _ = parse_config({**old, "cross_attention_dim": None, "only_cross_attention": False})
    assert layout == "DiTTransformer2DModel"
    with pytest.raises(SetupError) as caught:
        parse_config({**old, "norm_type": "layer_norm"})
    assert caught.value.subject == "base, config.json, _class_name"
