"""The transformer against a plain reading of its definition, and what is claimed about its size and cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ddm.errors import ShapeError
from ddm.models import build_expert, expected_tensors, num_parameters, training_flops
from ddm.models.dit import DiT, sincos_positions
from ddm.protocol.plan import Dit
from ddm.tensors import spec_of

SMALL = Dit(patch=2, hidden=16, depth=2, heads=2)
DEMO = Dit(patch=2, hidden=96, depth=4, heads=4)


def awake(shape: tuple[int, int, int] = (3, 4, 6)) -> DiT:
    """A small model whose zero gates have been given values, in float64."""
    model = DiT(shape, patch=2, hidden=16, depth=2, heads=2).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def inputs(shape: tuple[int, int, int] = (3, 4, 6), num: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, *shape, generator=generator).double(), torch.linspace(0, 1, num).double()


def plain_dit(model: DiT, image: Tensor, t: Tensor) -> Tensor:
    """Equations of Peebles and Xie for one image, token by token, attention written out."""
    channels, height, width = image.shape
    patch, rows, columns = 2, height // 2, width // 2
    tokens = []
    for row in range(rows):
        for column in range(columns):
            part = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].reshape(-1)
            tokens.append(model.embed(part) + model.position_ND[row * columns + column])
    condition = F.silu(
        model.time.mlp(torch.cat([(t * model.time.frequencies).cos(), (t * model.time.frequencies).sin()]))
    )
    parts = list(model.modulation(condition).split(16))

    def normalised(token: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        centred = token - token.mean()
        return centred / (centred.square().mean() + 1e-6).sqrt() * (1 + scale) + shift

    for block in model.blocks:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (parts.pop(0) for _ in range(6))
        projected = [block.qkv(normalised(token, shift_a, scale_a)).split(16) for token in tokens]
        for i, token in enumerate(list(tokens)):
            heads = []
            for head in (slice(0, 8), slice(8, 16)):
                logits = torch.stack([projected[i][0][head] @ key[head] / 8**0.5 for _, key, _ in projected])
                values = torch.stack([value[head] for _, _, value in projected])
                heads.append(logits.softmax(dim=0) @ values)
            tokens[i] = token + gate_a * block.project(torch.cat(heads))
        for i, token in enumerate(list(tokens)):
            tokens[i] = token + gate_m * block.down(F.gelu(block.up(normalised(token, shift_m, scale_m))))
    out = torch.empty_like(image)
    for i, token in enumerate(tokens):
        row, column = divmod(i, columns)
        patch_out = model.head(normalised(token, *parts)).reshape(channels, patch, patch)
        out[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = patch_out
    return out


def test_dit_equals_its_definition_written_out() -> None:
    model = awake()
    x, t_B = inputs()
    with torch.no_grad():
        found = model(x, t_B)
        expected = torch.stack([plain_dit(model, image, t) for image, t in zip(x, t_B, strict=True)])
        assert torch.allclose(found, expected, atol=1e-10)
        assert not torch.allclose(model(x, t_B.flip(0)), expected, atol=1e-2)
        assert not torch.allclose(model(x.flip(3), t_B).flip(3), expected, atol=1e-2)


def test_fresh_dit_answers_zero_but_learns_from_the_first_gradient() -> None:
    model = build_expert(SMALL, (1, 4, 4))
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    answer = model(x, torch.full((3,), 0.5))
    assert torch.equal(answer, torch.zeros_like(x))
    (answer - x).square().mean().backward()
    assert model.get_parameter("head.bias").grad is not None
    assert bool(model.get_parameter("head.weight").grad.abs().max() > 0)  # type: ignore[union-attr]


def test_images_of_a_batch_do_not_see_each_other() -> None:
    model = awake()
    x, t_B = inputs()
    changed = x.clone()
    changed[1:] += 1
    assert torch.allclose(model(x, t_B)[0], model(changed, t_B)[0], atol=1e-12)


def test_positions_are_distinct_and_of_equal_norm() -> None:
    position_ND = sincos_positions(5, 7, 32)
    assert torch.allclose(position_ND.square().sum(dim=1), torch.full((35,), 16.0))
    assert torch.cdist(position_ND, position_ND).fill_diagonal_(1.0).min() > 0.1
    assert sincos_positions(2, 2, 6).shape == (4, 6)


@pytest.mark.parametrize("architecture", [SMALL, DEMO])
def test_expected_tensors_are_those_of_the_built_model(architecture: Dit) -> None:
    model = build_expert(architecture, (1, 8, 8))
    expected = expected_tensors(architecture, (1, 8, 8))
    assert expected == {name: spec_of(value) for name, value in model.state_dict().items()}
    assert num_parameters(model) == sum(spec.bytes for spec in expected.values()) // 4
    assert expected != expected_tensors(architecture, (3, 8, 8))


@pytest.mark.parametrize(("architecture", "shape"), [(SMALL, (3, 4, 6)), (DEMO, (1, 8, 8))])
def test_training_flops_equal_those_that_torch_counts(architecture: Dit, shape: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        model = build_expert(architecture, shape)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(7, *shape), torch.empty(7)).sum().backward()
    assert training_flops(architecture, shape, 7) == counter.get_total_flops()
    assert training_flops(architecture, shape, 8) != counter.get_total_flops()


def test_initial_weights_are_a_function_of_the_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (build_expert(SMALL, (1, 4, 4), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("shape", "architecture"), [((1, 5, 4), SMALL), ((1, 4, 5), SMALL), ((4, 4), SMALL), ((1, 8, 8, 8), SMALL)]
)
def test_architecture_is_refused_when_it_does_not_fit_the_shape(shape: tuple[int, ...], architecture: Dit) -> None:
    with pytest.raises(ShapeError):
        build_expert(architecture, shape)
    with pytest.raises(ShapeError):
        expected_tensors(architecture, shape)


def test_images_or_times_of_another_shape_are_refused() -> None:
    model = build_expert(SMALL, (1, 4, 4))
    for x, t_B in ((torch.zeros(2, 1, 4, 6), torch.zeros(2)), (torch.zeros(2, 1, 4, 4), torch.zeros(3))):
        with pytest.raises(ShapeError):
            model(x, t_B)
