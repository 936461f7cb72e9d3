"""A base in another network than its own: what the adjusted weights answer, against what the base answers."""

from math import cos, sin

import pytest
import torch
from torch import Tensor, nn

from ddm.errors import TensorFileError
from ddm.models import MAX_WEIGHT, build_expert, expected_tensors
from ddm.models.base_weights import BaseWeights, fit_base
from ddm.models.layers import sincos_positions
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)

DIT = Dit(patch=2, hidden=16, depth=2, heads=2)
UNET = Unet(
    channels=(8, 16), attention=(False, True), num_res_blocks=1, head_channels=8, norm_groups=4
)
MMDIT = Mmdit(patch=2, hidden=16, depth=2, heads=2, shared_depth=1)
GREY = (1, 8, 8)
COLOUR = (3, 8, 8)
NONE = NoCondition()
THREE = ClassCondition(num_classes=3)
FIVE = ClassCondition(num_classes=5)
TEXT = TextCondition(dim=6, max_tokens=3)
# An mmdit has no classes, and neither of the others needs a text.
BOTH = pytest.mark.parametrize("architecture", [DIT, UNET], ids=["dit", "unet"])
ALL = pytest.mark.parametrize(
    ("architecture", "condition"),
    [(DIT, NONE), (UNET, NONE), (MMDIT, TEXT)],
    ids=["dit", "unet", "mmdit"],
)


def made_network(
    architecture: Architecture, shape: tuple[int, ...], condition: Condition = NONE
) -> nn.Module:
    """A network that answers something, as a trained one does."""
    network = build_expert(architecture, shape, condition=condition, seed=3)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=random))
    return network.eval()


def fitted_network(
    base: nn.Module,
    architecture: Architecture,
    shape: tuple[int, ...],
    condition: Condition = NONE,
    base_shape: tuple[int, ...] | None = None,
) -> nn.Module:
    weights = BaseWeights(base.state_dict(), base_shape)
    fitted = fit_base(weights, architecture, shape, condition)
    network = build_expert(architecture, shape, condition=condition)
    network.load_state_dict(fitted.tensors)
    return network.eval()


def samples(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    return torch.randn(4, *shape, generator=random), torch.tensor([0.1, 0.4, 0.6, 0.9])


def texts(condition: Condition) -> tuple[Tensor, ...]:
    """The texts of the samples as a network's third input; none for a network that reads no text."""
    if not isinstance(condition, TextCondition):
        return ()
    random = torch.Generator().manual_seed(6)
    return (torch.randn(4, condition.max_tokens, condition.dim, generator=random),)


@pytest.mark.parametrize(
    ("architecture", "condition"),
    [(DIT, THREE), (UNET, THREE), (MMDIT, TEXT)],
    ids=["dit", "unet", "mmdit"],
)
def test_base_of_the_same_network_is_taken_unchanged(
    architecture: Architecture, condition: Condition
) -> None:
    base = made_network(architecture, GREY, condition)
    fitted = fit_base(BaseWeights(base.state_dict(), GREY), architecture, GREY, condition)
    assert fitted.changes == ()
    assert all(
        torch.equal(fitted.tensors[name], value) for name, value in base.state_dict().items()
    )


@BOTH
@torch.no_grad()
def test_added_classes_are_answered_as_no_class_and_the_others_as_before(
    architecture: Architecture,
) -> None:
    base = made_network(architecture, GREY, THREE)
    network = fitted_network(base, architecture, GREY, FIVE)
    x, t = samples(GREY)
    old = torch.tensor([-1, 0, 1, 2])
    assert torch.equal(network(x, t, old), base(x, t, old))
    new = torch.tensor([3, 4, 3, 4])
    assert torch.equal(network(x, t, new), base(x, t, torch.full((4,), -1)))
    assert not torch.equal(network(x, t, old), network(x, t, new)), "the classes say something"


@BOTH
@torch.no_grad()
def test_base_without_classes_answers_every_class_as_it_did(architecture: Architecture) -> None:
    base = made_network(architecture, GREY)
    network = fitted_network(base, architecture, GREY, THREE)
    x, t = samples(GREY)
    assert torch.equal(network(x, t, torch.tensor([-1, 0, 1, 2])), base(x, t))


@BOTH
@torch.no_grad()
def test_base_with_classes_answers_in_a_plan_without_them_as_for_no_class(
    architecture: Architecture,
) -> None:
    base = made_network(architecture, GREY, THREE)
    network = fitted_network(base, architecture, GREY)
    x, t = samples(GREY)
    torch.testing.assert_close(network(x, t), base(x, t, torch.full((4,), -1)))


@ALL
@torch.no_grad()
def test_colour_base_answers_a_grey_sample_as_the_same_values_in_every_channel_averaged(
    architecture: Architecture, condition: Condition
) -> None:
    base = made_network(architecture, COLOUR, condition)
    network = fitted_network(base, architecture, GREY, condition, base_shape=COLOUR)
    x, t = samples(GREY)
    condition_inputs = texts(condition)
    expected = base(x.expand(-1, 3, -1, -1), t, *condition_inputs).mean(1, keepdim=True)
    torch.testing.assert_close(network(x, t, *condition_inputs), expected, atol=1e-5, rtol=1e-4)


@ALL
@torch.no_grad()
def test_grey_base_answers_every_channel_as_the_mean_of_the_channels(
    architecture: Architecture, condition: Condition
) -> None:
    base = made_network(architecture, GREY, condition)
    network = fitted_network(base, architecture, COLOUR, condition, base_shape=GREY)
    x, t = samples(COLOUR)
    condition_inputs = texts(condition)
    expected = base(x.mean(1, keepdim=True), t, *condition_inputs).expand(-1, 3, -1, -1)
    torch.testing.assert_close(network(x, t, *condition_inputs), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_base_without_texts_answers_a_text_as_it_did_without() -> None:
    base = made_network(DIT, GREY)
    network = fitted_network(base, DIT, GREY, TEXT)
    x, t = samples(GREY)
    torch.testing.assert_close(network(x, t, torch.ones(4, 3, 6)), base(x, t))


def test_mmdit_without_what_reads_a_text_gets_it_new_and_keeps_every_other_weight() -> None:
    """So it is with a checkpoint of diffusers, whose layers read other encoders' texts."""
    base = made_network(MMDIT, GREY, TEXT).state_dict()
    of_images = {
        name: value for name, value in base.items() if not name.startswith(("text.", "pooled."))
    }
    assert len(base) - len(of_images) == 7
    fitted = fit_base(BaseWeights(of_images, GREY), MMDIT, GREY, TEXT)
    assert fitted.changes == ("7 tensors that read a text added, with initial weights",)
    fresh = build_expert(MMDIT, GREY, condition=TEXT, seed=0).state_dict()
    for name, value in fitted.tensors.items():
        assert torch.equal(value, of_images.get(name, fresh[name])), name


def test_places_of_a_larger_image_lie_between_those_of_the_base() -> None:
    """The closed form of the interpolation: row r of R is placed at r G / R, of which a sine and cosine are taken."""
    rows = 4
    columns = 6
    hidden = 8
    grid = (2, 3)
    positions = sincos_positions(rows, columns, hidden, grid).reshape(rows, columns, hidden)
    frequencies = (1.0, 0.01)  # 10,000^-(i / 2) for the two of a quarter
    for row in range(rows):
        for column in range(columns):
            row_place = row * 2 / rows
            column_place = column * 3 / columns
            expected = [
                wave(place * frequency)
                for place in (row_place, column_place)
                for wave in (sin, cos)
                for frequency in frequencies
            ]
            found = positions[row, column].tolist()
            assert found == pytest.approx(expected, abs=1e-6)
    known = sincos_positions(2, 3, hidden).reshape(2, 3, hidden)
    torch.testing.assert_close(positions[::2, ::2], known)


@pytest.mark.parametrize(
    ("transformer", "condition"), [(DIT, NONE), (MMDIT, TEXT)], ids=["dit", "mmdit"]
)
def test_larger_samples_need_no_other_tensors_and_the_change_is_stated(
    transformer: Dit | Mmdit, condition: Condition
) -> None:
    large = (1, 16, 16)
    base = made_network(transformer, GREY, condition)
    architecture = transformer.spanning(transformer.patch_grid(GREY), large)
    assert architecture.position_grid == (4, 4)
    fitted = fit_base(BaseWeights(base.state_dict(), GREY), architecture, large, condition)
    assert fitted.changes == ("samples of 16 x 16 instead of 8 x 8",)
    assert set(fitted.tensors) == set(expected_tensors(architecture, large, condition))


@pytest.mark.parametrize(
    ("base", "plan", "tensor"),
    [
        pytest.param((DIT, GREY, FIVE), (DIT, GREY, THREE), "classes.table.weight", id="classes"),
        pytest.param(
            (DIT, GREY, NONE),
            (DIT.model_copy(update={"patch": 4}), GREY, NONE),
            "embed.weight",
            id="patch",
        ),
        pytest.param((DIT, COLOUR, NONE), (DIT, (4, 8, 8), NONE), "embed.weight", id="channels"),
        pytest.param(
            (DIT, GREY, NONE),
            (DIT.model_copy(update={"depth": 3}), GREY, NONE),
            "modulation.weight",
            id="depth",
        ),
        pytest.param(
            (DIT.model_copy(update={"depth": 1, "qk_norm": True}), GREY, NONE),
            (DIT.model_copy(update={"depth": 1}), GREY, NONE),
            "'blocks.0.norms.0.scale'",
            id="unknown",
        ),
        pytest.param(
            (UNET, GREY, NONE),
            (UNET, GREY, TextCondition(dim=4, max_tokens=2)),
            "null",
            id="text of a unet",
        ),
        pytest.param(
            (MMDIT, GREY, TEXT),
            (MMDIT, GREY, TextCondition(dim=4, max_tokens=3)),
            "text.mlp.0.weight",
            id="text of another width",
        ),
        pytest.param(
            (MMDIT, GREY, TEXT),
            (MMDIT.model_copy(update={"shared_depth": 0}), GREY, TEXT),
            "joint.1.image.qkv.weight",
            id="shared block",
        ),
    ],
)
def test_base_that_does_not_fit_is_refused_by_the_name_of_the_tensor(
    base: tuple[Architecture, tuple[int, ...], Condition],
    plan: tuple[Architecture, tuple[int, ...], Condition],
    tensor: str,
) -> None:
    network = made_network(*base)
    with pytest.raises(TensorFileError) as caught:
        fit_base(BaseWeights(network.state_dict(), base[1]), *plan)
    assert caught.value.subject == f"base, tensor {tensor}"


@pytest.mark.parametrize("sides", [(), (3,)], ids=["no side", "one side"])
@pytest.mark.parametrize(
    "name", ["classes.table.weight", "time.mlp.2.bias", "embed.weight", "head.weight", "head.bias"]
)
def test_tensor_with_another_number_of_sides_is_refused(name: str, sides: tuple[int, ...]) -> None:
    """The attack: a hostile file of a base ends `aggregator plan` as if by a bug."""
    tensors = made_network(DIT, COLOUR).state_dict() | {name: torch.zeros(sides)}
    for condition in (NONE, THREE):
        with pytest.raises(TensorFileError):
            fit_base(BaseWeights(tensors, COLOUR), DIT, GREY, condition)


def test_base_whose_sums_cross_the_bound_of_weights_is_refused() -> None:
    """Every silo would refuse a plan with it, after the plan was signed and sent."""
    tensors = made_network(DIT, COLOUR).state_dict()
    tensors["embed.weight"] = torch.full_like(tensors["embed.weight"], MAX_WEIGHT)
    assert fit_base(BaseWeights(tensors, COLOUR), DIT, COLOUR, NONE).tensors
    with pytest.raises(TensorFileError) as caught:
        fit_base(BaseWeights(tensors, COLOUR), DIT, GREY, NONE)
    assert caught.value.subject == "base, tensor embed.weight"
