"""The U-Net as an expert: how it is called, what it refuses, and that it learns on images and volumes."""

import itertools
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm.errors import SetupError, ShapeError
from ddm.models import build_expert, expected_tensors, num_parameters, training_flops
from ddm.models.unet import TIME_SCALE, UnetNetwork
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, TextCondition, Unet
from tests.support.errors import has_subject

SMALL = Unet(
    channels=(8, 16), attention=(False, True), num_res_blocks=1, head_channels=8, norm_groups=4
)
CLASSES = ClassCondition(num_classes=3)
TEXT = TextCondition(dim=5, max_tokens=4)
SHAPES = [(2, 8, 12), (1, 8, 4, 12)]


def awake(shape: tuple[int, ...], condition: Condition = NoCondition()) -> UnetNetwork:
    """A model whose zero convolutions have been given values."""
    model = build_expert(SMALL, shape, condition=condition)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    assert isinstance(model, UnetNetwork)
    return model.eval()


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)), torch.tensor(
        [0.1, 0.5, 0.9]
    )


def test_unet_without_monai_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "monai.networks.nets", None)
    with pytest.raises(SetupError, check=has_subject("architecture unet")) as caught:
        build_expert(SMALL, (1, 8, 8))
    assert "monai" in caught.value.remedy


@pytest.mark.parametrize("shape", [(1, 7, 8), (1, 8, 8, 7)])
def test_sides_that_the_levels_cannot_halve_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, check=has_subject("architecture unet")):
        build_expert(SMALL, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=["2D", "3D"])
def test_fresh_unet_answers_zero_and_every_weight_of_an_awake_one_learns(
    shape: tuple[int, ...],
) -> None:
    x, t_B = inputs(shape)
    assert torch.equal(build_expert(SMALL, shape)(x, t_B), torch.zeros_like(x))
    model = awake(shape)
    model(x, t_B).square().mean().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_time_is_told_on_the_scale_that_monai_embeds() -> None:
    (x, t_B) = inputs(SHAPES[0])
    model = awake(SHAPES[0])
    with torch.no_grad():
        assert torch.equal(model(x, t_B), model.net(x, TIME_SCALE * t_B))
        # Unscaled, all times look alike: they differ far less than they should.
        spread = [
            float((model.net(x, s * t_B) - model.net(x, s * t_B.flip(0))).norm())
            for s in (1.0, TIME_SCALE)
        ]
    assert spread[0] < 0.5 * spread[1]


@pytest.mark.parametrize("shape", SHAPES, ids=["2D", "3D"])
@pytest.mark.parametrize(
    ("condition", "c", "nobody"),
    [
        (CLASSES, torch.tensor([0, 1, 2]), torch.tensor([-1, -1, -1])),
        (
            TEXT,
            torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(2)),
            torch.zeros(3, 2, 5),
        ),
    ],
    ids=["class", "text"],
)
def test_condition_changes_the_answer_and_nobody_with_one_is_asked_as_each_without(
    shape: tuple[int, ...], condition: Condition, c: Tensor, nobody: Tensor
) -> None:
    (x, t_B) = inputs(shape)
    model = awake(shape, condition)
    with torch.no_grad():
        answers = [model(x, t_B, condition) for condition in (c, c.roll(1, 0), nobody)]
        torch.testing.assert_close(model(x, t_B), answers[2])
        for one, other in itertools.combinations(answers, 2):
            assert bool(((one - other).flatten(1).abs().amax(1) > 1e-4).all())
    with pytest.raises(ShapeError):
        model(x, t_B, c[:2])


def test_what_a_text_means_does_not_depend_on_how_it_is_padded() -> None:
    (x, t_B) = inputs(SHAPES[0])
    model = awake(SHAPES[0], TEXT)
    c = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(2))
    longer = torch.cat([c, torch.zeros(3, 2, 5)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(x, t_B, c), model(x, t_B, longer))
        assert float((model(x, t_B, c) - model(x, t_B, longer + 0.1)).abs().max()) > 1e-4


@pytest.mark.parametrize("shape", SHAPES, ids=["2D", "3D"])
@pytest.mark.parametrize("condition", [NoCondition(), CLASSES, TEXT], ids=["none", "class", "text"])
def test_weights_are_known_before_the_model_is_built(
    shape: tuple[int, ...], condition: Condition
) -> None:
    model = build_expert(SMALL, shape, condition=condition, seed=1)
    expected = expected_tensors(SMALL, shape, condition)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: spec.shape for name, spec in expected.items()
    }
    same = build_expert(SMALL, shape, condition=condition, seed=1).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dims", [2, 3])
def test_size_of_a_unet_of_one_level_is_the_one_counted_by_hand(dims: int) -> None:
    width = 8
    kernel = 3**dims
    one = Unet(
        channels=(width,), attention=(False,), num_res_blocks=1, head_channels=8, norm_groups=4
    )
    time = 4 * width
    linear = width**2 + width

    def block(inner: int) -> int:
        """Two normalisations, two convolutions, the time, and a way around where the width changes."""
        around = inner * width + width if inner != width else 0
        convolutions = (inner + width) * width * kernel + 2 * width
        return 2 * inner + 2 * width + convolutions + time * width + width + around

    ends = (width * kernel + width) + 2 * width + (width * kernel + 1)
    times = (width * time + time) + (time * time + time)
    attention = 2 * width + 4 * linear
    # One block down, two around the attention in the middle, two up, which read what came down as well.
    by_hand = ends + times + 3 * block(width) + attention + 2 * block(2 * width)
    assert num_parameters(build_expert(one, (1, *[4] * dims))) == by_hand


@pytest.mark.parametrize("shape", SHAPES, ids=["2D", "3D"])
@pytest.mark.parametrize("condition", [NoCondition(), CLASSES, TEXT], ids=["none", "class", "text"])
def test_training_flops_equal_those_of_a_real_batch(
    shape: tuple[int, ...], condition: Condition
) -> None:
    (x, t_B) = inputs(shape)
    model = awake(shape, condition)
    c = {
        "none": (),
        "class": (torch.zeros(3, dtype=torch.int64),),
        "text": (torch.zeros(3, 4, 5),),
    }[condition.kind]
    # The processor's own attention kernel is one that torch does not count.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, t_B, *c).sum().backward()
    assert training_flops(SMALL, shape, 3, condition) == counter.get_total_flops()
    assert training_flops(SMALL, shape, 2, condition) != counter.get_total_flops()


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 8, 8, 8)], ids=["2D", "3D"])
def test_unet_learns_to_denoise_one_sample(shape: tuple[int, ...]) -> None:
    model = build_expert(SMALL, shape, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.linspace(-1, 1, 8).expand(shape)
    losses = []
    for _ in range(60):
        eps = torch.randn(8, *shape, generator=generator)
        t_B = torch.rand(8, generator=generator)
        t = t_B.view(-1, *[1] * len(shape))
        loss = (model((1 - t) * x_0 + t * eps, t_B) - (eps - x_0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
