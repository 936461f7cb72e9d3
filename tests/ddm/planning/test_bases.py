"""The base that a recipe names: opened from a file or a folder of diffusers, fitted, and stated in the plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from ddm.errors import MissingFileError, SetupError, TensorFileError
from ddm.io.tensors import save_tensors
from ddm.models import build_expert
from ddm.models.base_weights import BaseWeights
from ddm.planning.bases import BaseSource, BaseSpace, OpenedBase, check_licence, open_base
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    NoCondition,
    PinnedEncoder,
    TextCondition,
)
from ddm.protocol.base import File, sha256_file
from ddm.protocol.bases import PERMISSIVE_LICENCES, FileBase, licence_misfit
from ddm.protocol.latent import AutoencoderKlLatent, DiffusersKlLatent, IdentityLatent
from ddm.protocol.learning import ExpertObjective, FullAdaptation
from tests.support.federation import recipe

SHAPE = (1, 4, 4)
SIZES = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
TRAINING = {"num_steps": 6, "batch_size": 8, "precision": "fp32"}
EXPERT = {"architecture": SIZES, "training": TRAINING}
DIFFUSERS_CONFIG = {
    "_class_name": "DiTTransformer2DModel",
    "_diffusers_version": "0.35.0",
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 1,
    "out_channels": 2,
    "num_layers": 1,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 3,
}


def space(condition: Condition = NoCondition(), **changes: Any) -> BaseSpace:
    """That of experts on pixels."""
    return replace(BaseSpace(IdentityLatent(), None, condition, (-1.0, 1.0)), **changes)


def weights_file(path: Path, shape: tuple[int, ...] = SHAPE) -> Path:
    save_tensors(path, build_expert(Dit.model_validate(SIZES), shape, seed=1).state_dict())
    return path


def opened(chosen: dict[str, Any], condition: Condition = NoCondition()) -> OpenedBase:
    base = open_base(recipe(base=chosen, expert=EXPERT), SHAPE, space(condition), None)
    assert base is not None
    return base


def diffusers_folder(folder: Path, **changes: object) -> Path:
    """A small DiT in the layout of diffusers, with made weights."""
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=random)

    tensors = {"pos_embed.proj.weight": made(16, 1, 2, 2), "pos_embed.proj.bias": made(16)}
    block = "transformer_blocks.0"
    layers = {
        f"{block}.norm1.emb.timestep_embedder.linear_1": (16, 256),
        f"{block}.norm1.emb.timestep_embedder.linear_2": (16, 16),
        f"{block}.norm1.linear": (96, 16),
        **{f"{block}.attn1.to_{name}": (16, 16) for name in ("q", "k", "v", "out.0")},
        f"{block}.ff.net.0.proj": (64, 16),
        f"{block}.ff.net.2": (16, 64),
        "proj_out_1": (32, 16),
        "proj_out_2": (8, 16),
    }
    for name, shape in layers.items():
        tensors[f"{name}.weight"] = made(*shape)
        tensors[f"{name}.bias"] = made(shape[0])
    tensors[f"{block}.norm1.emb.class_embedder.embedding_table.weight"] = made(4, 16)
    folder.mkdir()
    save_tensors(folder / "diffusion_pytorch_model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(DIFFUSERS_CONFIG | changes), "utf-8")
    return folder


def test_all_weights_are_trained_from_a_base_at_half_the_rate_where_the_recipe_says_no_more(
    tmp_path: Path,
) -> None:
    plain = recipe(expert=EXPERT).expert
    base = {"kind": "file", "file": "base.safetensors", "licence": "MIT"}
    warm = recipe(expert=EXPERT, base=base).expert
    assert plain.adaptation == FullAdaptation()
    assert warm.adaptation == FullAdaptation(base="plan/base.safetensors")
    assert warm.training.learning_rate == plain.training.learning_rate / 2
    stated = EXPERT | {"training": TRAINING | {"learning_rate": 0.003}}
    assert recipe(expert=stated, base=base).expert.training.learning_rate == 0.003


@pytest.mark.parametrize(
    "changes",
    [
        {"adaptation": {"kind": "own", "plan_id": "digits-0123abcd"}, "base": True},
        {"adaptation": {"kind": "lora", "rank": 2, "alpha": 2.0}, "base": False},
        {"adaptation": {"kind": "full", "base": "plan/base.safetensors"}, "base": False},
    ],
    ids=["own with a base", "lora without one", "full without the one it names"],
)
def test_recipe_is_refused_when_base_and_adaptation_do_not_belong_together(
    changes: dict[str, Any],
) -> None:
    base = {"kind": "file", "file": "base.safetensors", "licence": "MIT"}
    tables = {"base": base} if changes["base"] else {}
    with pytest.raises(ValidationError):
        recipe(expert=EXPERT | {"adaptation": changes["adaptation"]}, **tables)


def test_base_is_opened_through_links_as_hugging_faces_cache_has_them(tmp_path: Path) -> None:
    blobs = diffusers_folder(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    classes = ClassCondition(num_classes=3)
    linked = opened({"kind": "diffusers", "folder": str(snapshot), "licence": "MIT"}, classes)
    plain = opened({"kind": "diffusers", "folder": str(blobs), "licence": "MIT"}, classes)
    assert linked.source.origin == plain.source.origin
    assert all(torch.equal(linked.tensors[name], plain.tensors[name]) for name in plain.tensors)

    link = tmp_path / "link.safetensors"
    link.symlink_to(weights_file(tmp_path / "base.safetensors"))
    of_file = opened({"kind": "file", "file": str(link), "licence": "MIT"})
    assert isinstance(of_file.source.origin, FileBase)
    assert of_file.source.origin.digest == sha256_file(tmp_path / "base.safetensors")


def test_objective_that_nothing_learns_is_refused_in_our_own_words(tmp_path: Path) -> None:
    path = weights_file(tmp_path / "base.safetensors")
    with pytest.raises(SetupError) as caught:
        opened(
            {"kind": "file", "file": str(path), "licence": "MIT", "path": "ddpm_linear"}
            | {"prediction": "velocity"}
        )
    assert caught.value.got and not caught.value.got.startswith("Value error")


def test_file_is_opened_and_its_positions_span_what_it_knows(tmp_path: Path) -> None:
    path = weights_file(tmp_path / "base.safetensors", (1, 2, 2))
    base = opened(
        {"kind": "file", "file": str(path), "licence": "MIT", "shape": [1, 2, 2], "path": "edm"}
        | {"prediction": "v"}
    )
    stated = base.describe("0" * 64, IdentityLatent())
    assert isinstance(stated.origin, FileBase) and stated.num_images is None
    assert (stated.objective.path, stated.objective.prediction) == ("edm", "v")
    assert stated.changes == ("samples of 4 x 4 instead of 2 x 2",)
    placed = base.fit_positions(recipe(expert=EXPERT).expert, SHAPE).architecture
    assert isinstance(placed, Dit) and placed.position_grid == (1, 1)


@pytest.mark.parametrize("stated", [[2, 2, 1], [2, 2, 2], [1, 3, 4], [1, 4, 4, 4]])
def test_file_is_refused_when_the_stated_shape_has_other_channels_or_sides_than_its_samples(
    tmp_path: Path, stated: list[int]
) -> None:
    """The fault: of a shape with the channels last follow other positions, and nothing is noticed."""
    path = weights_file(tmp_path / "base.safetensors", (1, 2, 2))
    with pytest.raises(SetupError) as caught:
        opened({"kind": "file", "file": str(path), "licence": "MIT", "shape": stated})
    assert caught.value.subject == "recipe, base.shape"
    assert caught.value.got == str(stated)


UNET = {
    "kind": "unet",
    "channels": [8, 16],
    "attention": [False, True],
    "num_res_blocks": 1,
    "head_channels": 8,
    "norm_groups": 4,
}


@pytest.mark.parametrize(
    ("of_base", "field"),
    [
        (SIZES | {"heads": 4}, "heads"),
        (UNET | {"head_channels": 16}, "head_channels"),
        (UNET | {"norm_groups": 8}, "norm_groups"),
        (UNET, "kind"),
    ],
)
def test_base_of_another_architecture_is_refused_although_its_tensors_have_the_same_shapes(
    tmp_path: Path, of_base: dict[str, Any], field: str
) -> None:
    """The fault: weights of two heads in a network of four compute another attention, and training starts from it."""
    of_recipe = UNET if of_base["kind"] == "unet" and field != "kind" else SIZES
    own: Architecture = TypeAdapter(Architecture).validate_python(of_base, strict=False)
    training = TRAINING | {"learning_rate": 0.001}
    released = recipe(
        base={"kind": "release", "release": "release"},
        expert={"architecture": of_recipe, "training": training},
    )
    weights = build_expert(own, SHAPE, seed=1).state_dict()
    source = BaseSource(
        BaseWeights(weights, SHAPE),
        own.position_span(SHAPE),
        FileBase(digest="0" * 64),
        "MIT",
        None,
        ExpertObjective(),
        space(),
        architecture=own,
    )
    with pytest.raises(SetupError) as caught:
        open_base(released, SHAPE, space(), source)
    assert caught.value.subject == f"recipe, expert.architecture.{field}"
    # The control: its own architecture, on another grid of positions.
    expert = released.expert.model_copy(update={"architecture": own})
    if isinstance(own, Dit):
        placed = own.model_copy(update={"position_grid": (3, 3)})
        expert = released.expert.model_copy(update={"architecture": placed})
    of_same_network = released.model_copy(update={"expert": expert})
    base = open_base(of_same_network, SHAPE, space(), source)
    assert base is not None and base.changes == ()


def test_folder_of_diffusers_is_opened_without_diffusers(tmp_path: Path) -> None:
    folder = diffusers_folder(tmp_path / "dit")
    base = opened(
        {"kind": "diffusers", "folder": str(folder), "licence": "CC-BY-NC-4.0", "num_images": 9}
        | {"source": "DiT-XL-2-256"}
    )
    stated = base.describe("0" * 64, IdentityLatent())
    assert isinstance(stated.origin, FileBase)
    assert stated.origin.layout == "DiTTransformer2DModel"
    assert (stated.objective.path, stated.objective.prediction) == ("ddpm_linear", "eps")
    assert any("classes left out" in change for change in stated.changes)
    assert stated.source == "DiT-XL-2-256"
    assert stated.words.endswith("; in the operator's words: DiT-XL-2-256")
    assert "DiTTransformer2DModel" in stated.words and "CC-BY-NC-4.0" in stated.words


@pytest.mark.parametrize(
    ("spoil", "subject"),
    [
        (lambda folder: (folder / "config.json").write_text("[]"), "_class_name"),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps(DIFFUSERS_CONFIG | {"_class_name": "UNet3DConditionModel"})
            ),
            "_class_name",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps(DIFFUSERS_CONFIG | {"norm_type": "ada_norm"})
            ),
            "norm_type",
        ),
    ],
    ids=["no object", "other network", "other normalisation"],
)
def test_folder_of_another_network_is_refused_by_the_field_of_its_configuration(
    tmp_path: Path, spoil: Callable[[Path], object], subject: str
) -> None:
    folder = diffusers_folder(tmp_path / "dit")
    spoil(folder)
    with pytest.raises(SetupError) as caught:
        opened({"kind": "diffusers", "folder": str(folder), "licence": "MIT"})
    assert caught.value.subject == f"base, config.json, {subject}"


@pytest.mark.parametrize("source", ["", "a" * 201, "two\nlines"])
def test_source_of_a_base_is_one_bounded_line(source: str) -> None:
    base = {"kind": "file", "file": "base.safetensors", "licence": "MIT", "source": source}
    with pytest.raises(ValidationError):
        recipe(expert=EXPERT, base=base)


def test_base_that_is_missing_or_a_pickle_is_refused(tmp_path: Path) -> None:
    chosen = {"kind": "file", "file": str(tmp_path / "base.safetensors"), "licence": "MIT"}
    with pytest.raises(MissingFileError):
        opened(chosen)
    torch.save({"head.weight": torch.zeros(2)}, tmp_path / "base.safetensors")
    with pytest.raises(TensorFileError):
        opened(chosen)


def test_tensors_with_other_sides_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    folder = diffusers_folder(tmp_path / "dit", out_channels=1)
    with pytest.raises(TensorFileError):
        opened({"kind": "diffusers", "folder": str(folder), "licence": "MIT"})


@pytest.mark.parametrize(
    ("base", "release", "fits"),
    [
        ("Apache-2.0", "CC-BY-NC-4.0", True),
        ("CC-BY-NC-4.0", "CC-BY-NC-4.0", True),
        ("CC-BY-NC-4.0", "CC-BY-4.0", False),
        ("CC-BY-SA-4.0", "CC0-1.0", False),
    ],
)
def test_licence_of_a_base_is_permissive_or_that_of_the_releases(
    tmp_path: Path, base: str, release: str, fits: bool
) -> None:
    assert (licence_misfit(base, release) is None) == fits
    path = weights_file(tmp_path / "base.safetensors")
    chosen = opened({"kind": "file", "file": str(path), "licence": base})
    if fits:
        check_licence(chosen, release)
        return
    with pytest.raises(SetupError):
        check_licence(chosen, release)
    assert base not in PERMISSIVE_LICENCES


def test_base_of_other_latents_or_of_classes_in_another_order_is_refused() -> None:
    assert space().compare(space()) == ()
    with pytest.raises(SetupError) as caught:
        space(autoencoder="a" * 64).compare(space())
    assert caught.value.subject == "recipe, latent"

    new = space(ClassCondition(num_classes=3, names=("lung", "heart", "skull")))
    same_order = ClassCondition(num_classes=2, names=("lung", "heart"))
    assert space(same_order).compare(new) == ()
    other_order = ClassCondition(num_classes=2, names=("heart", "lung"))
    with pytest.raises(SetupError) as caught:
        space(other_order).compare(new)
    assert caught.value.subject == "recipe, condition.names"


def texts(digest: str, name: str = "clip") -> TextCondition:
    files = tuple(
        File(path=path, bytes=size, digest=digest)
        for path, size in (("config.json", 1), ("model.safetensors", 9), ("tokenizer.json", 2))
    )
    return TextCondition(dim=4, max_tokens=2, encoder=PinnedEncoder(name=name, files=files))


def test_base_of_texts_of_another_encoder_of_equal_width_is_refused() -> None:
    assert space(texts("a" * 64)).compare(space(texts("a" * 64, name="renamed"))) == ()
    with pytest.raises(SetupError) as caught:
        space(texts("a" * 64)).compare(space(texts("b" * 64)))
    assert caught.value.subject == "recipe, condition.encoder"
    assert "a" * 16 in (caught.value.expected or "") and "b" * 16 in (caught.value.got or "")


def test_base_of_other_values_or_another_scale_of_latents_is_stated(tmp_path: Path) -> None:
    old_range = space(data_range=(0.0, 1.0))
    base = with_space(tmp_path / "base.safetensors", old_range)
    assert base.changes == ("images with values from -1 to 1 instead of 0 to 1",)

    def latents(scale: float) -> AutoencoderKlLatent:
        return AutoencoderKlLatent(
            channels=(8,), attention=(False,), latent_channels=1, norm_groups=4, scale=scale
        )

    scaled = space(latent=latents(2.0), autoencoder="a" * 64)
    # The plan fits the scale, so that it is open when the base is compared.
    assert scaled.compare(space(latent=latents(1.0), autoencoder="a" * 64)) == ()
    stated = replace(base, source=replace(base.source, space=scaled))
    assert stated.describe("0" * 64, latents(2.001)).changes == base.changes
    assert stated.describe("0" * 64, latents(4.0)).changes == (
        *base.changes,
        "latents divided by 4 instead of 2",
    )


def with_space(path: Path, learned: BaseSpace) -> OpenedBase:
    """A base on pixels that learned in this space."""
    file = opened({"kind": "file", "file": str(weights_file(path)), "licence": "MIT"})
    source = replace(file.source, space=learned)
    chosen = {"kind": "release", "release": "release"}
    base = open_base(recipe(base=chosen, expert=EXPERT), SHAPE, space(), source)
    assert base is not None
    return base


def test_other_factors_of_one_published_autoencoder_are_refused() -> None:
    def latents(factor: float) -> BaseSpace:
        published = DiffusersKlLatent(
            channels=(8,),
            latent_channels=1,
            layers_per_block=1,
            norm_groups=4,
            mid_attention=False,
            quant_conv=False,
            post_quant_conv=False,
            scaling_factor=factor,
        )
        return space(latent=published, autoencoder="a" * 64)

    assert latents(0.18).compare(latents(0.18)) == ()
    with pytest.raises(SetupError) as caught:
        latents(0.18).compare(latents(0.13))
    assert caught.value.subject == "recipe, latent.folder"
