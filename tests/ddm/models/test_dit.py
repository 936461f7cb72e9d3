"""The transformer against a plain reading of its definition, and what is claimed about its size and cost."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ddm.errors import ShapeError
from ddm.io.tensors import spec_of
from ddm.models import build_expert, expected_tensors, num_parameters, training_flops
from ddm.models.dit import DitNetwork
from ddm.models.layers import sincos_positions
from ddm.protocol.architecture import (
    ClassCondition,
    Condition,
    Dit,
    NoCondition,
    TextCondition,
)
from tests.support.case import case
from tests.support.errors import has_subject

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "architectures.md"
SMALL = Dit(patch=2, hidden=16, depth=2, heads=2)
DEMO = Dit(patch=2, hidden=96, depth=4, heads=4)
CLASSES = ClassCondition(num_classes=3)
TEXT = TextCondition(dim=5, max_tokens=4)


RELEASED = {
    "embed.weight": 1.988555,
    "time.mlp.0.weight": 2.26704,
    "time.mlp.2.weight": 0.336695,
    "modulation.weight": 0.0,
    "blocks.0.qkv.weight": -2.730774,
    "blocks.0.project.weight": -0.855076,
    "blocks.0.up.weight": -2.469363,
    "blocks.0.down.weight": 5.454828,
    "blocks.1.qkv.weight": -4.5522,
    "blocks.1.project.weight": -0.570339,
    "blocks.1.up.weight": -1.195303,
    "blocks.1.down.weight": -0.683996,
    "head.weight": 0.0,
}


def awake(
    shape: tuple[int, int, int] = (3, 4, 6),
    condition: Condition = NoCondition(),
    sizes: Dit = SMALL,
) -> DitNetwork:
    """A small model whose zero gates have been given values, in float64."""
    model = DitNetwork(sizes, shape, condition).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def inputs(shape: tuple[int, int, int] = (3, 4, 6), num: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, *shape, generator=generator).double(), torch.linspace(
        0, 1, num
    ).double()


def texts() -> Tensor:
    """Five texts: of two tokens, of four, of none, of one, and one with a hole."""
    c = torch.randn(5, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for i, empty in enumerate(([2, 3], [], [0, 1, 2, 3], [1, 2, 3], [0, 2])):
        c[i, empty] = 0
    return c


def plain_dit(model: DitNetwork, image: Tensor, t: Tensor, c: Tensor | None = None) -> Tensor:
    """Equations of Peebles and Xie for one image, token by token, attention written out."""
    channels, height, width = image.shape
    patch = 2
    rows = height // 2
    columns = width // 2
    tokens = []
    for row in range(rows):
        for column in range(columns):
            part = image[
                :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch
            ].reshape(-1)
            tokens.append(model.embed(part) + model.position_ND[row * columns + column])
    condition = model.time.mlp(
        torch.cat([(t * model.time.frequencies).cos(), (t * model.time.frequencies).sin()])
    )
    if model.classes is not None:
        condition = condition + model.classes.table.weight[int(c) + 1]
    words = []
    if model.text is not None:
        words = [model.text.mlp(word) for word in c if bool(word.any())] or [model.text.null]
    parts = list(model.modulation(F.silu(condition)).split(16))

    def normalised(token: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        centred = token - token.mean()
        return centred / (centred.square().mean() + 1e-6).sqrt() * (1 + scale) + shift

    for block in model.blocks:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (parts.pop(0) for _ in range(6))
        projected = [
            list(block.qkv(normalised(token, shift_a, scale_a)).split(16)) for token in tokens
        ]
        for number, norm in enumerate(block.norms):
            for vectors in projected:
                scaled = [
                    head / (head.square().mean() + 1e-6).sqrt() for head in vectors[number].split(8)
                ]
                vectors[number] = torch.cat([head * (1 + norm.scale) for head in scaled])
        for i, token in enumerate(list(tokens)):
            heads = []
            for head in (slice(0, 8), slice(8, 16)):
                logits = torch.stack(
                    [projected[i][0][head] @ key[head] / 8**0.5 for _, key, _ in projected]
                )
                values = torch.stack([value[head] for _, _, value in projected])
                heads.append(logits.softmax(dim=0) @ values)
            tokens[i] = token + gate_a * block.project(torch.cat(heads))
        for i, token in enumerate(list(tokens) if words else []):
            query = block.reader.query(normalised(token, torch.zeros(()), torch.zeros(())))
            read = [block.reader.key_value(word).split(16) for word in words]
            heads = []
            for head in (slice(0, 8), slice(8, 16)):
                logits = torch.stack([query[head] @ key[head] / 8**0.5 for key, _ in read])
                heads.append(
                    logits.softmax(dim=0) @ torch.stack([value[head] for _, value in read])
                )
            tokens[i] = token + block.reader.project(torch.cat(heads))
        for i, token in enumerate(list(tokens)):
            tokens[i] = token + gate_m * block.down(
                F.gelu(block.up(normalised(token, shift_m, scale_m)))
            )
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
        actual = model(x, t_B)
        expected = torch.stack(
            [plain_dit(model, image, t) for image, t in zip(x, t_B, strict=True)]
        )
        assert torch.allclose(actual, expected, atol=1e-10)
        assert not torch.allclose(model(x, t_B.flip(0)), expected, atol=1e-2)
        assert not torch.allclose(model(x.flip(3), t_B).flip(3), expected, atol=1e-2)


def test_queries_and_keys_are_normalised_in_every_head_where_the_architecture_says_so() -> None:
    model = awake(sizes=SMALL.model_copy(update={"qk_norm": True}))
    x, t_B = inputs()
    with torch.no_grad():
        expected = torch.stack(
            [plain_dit(model, image, t) for image, t in zip(x, t_B, strict=True)]
        )
        assert torch.allclose(model(x, t_B), expected, atol=1e-10)
        for block in model.blocks:
            block.qkv.weight[:32] *= 1000.0  # and so attention stays what it was
            block.qkv.bias[:32] *= 1000.0
        assert torch.allclose(model(x, t_B), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("condition", "c", "other"),
    [
        (CLASSES, torch.tensor([0, 2, -1, 1, 1]), torch.tensor([1, 0, 0, 2, -1])),
        (TEXT, texts(), texts().roll(1, 0)),
    ],
    ids=["class", "text"],
)
def test_conditional_dit_equals_its_definition_written_out(
    condition: Condition, c: Tensor, other: Tensor
) -> None:
    model = awake(condition=condition)
    x, t_B = inputs()
    with torch.no_grad():
        expected = torch.stack([plain_dit(model, *one) for one in zip(x, t_B, c, strict=True)])
        assert torch.allclose(model(x, t_B, c), expected, atol=1e-10)
        wrong = (model(x, t_B, other) - expected).flatten(1).abs().amax(1)
        assert bool((wrong > 1e-2).all())


def test_nobody_with_a_condition_is_asked_as_each_without_one() -> None:
    x, t_B = inputs()
    for condition, c in ((CLASSES, torch.full((5,), -1)), (TEXT, torch.zeros(5, 3, 5).double())):
        model = awake(condition=condition)
        assert torch.allclose(model(x, t_B), model(x, t_B, c), atol=1e-12)


def test_answer_does_not_depend_on_how_a_text_is_padded() -> None:
    model = awake(condition=TEXT)
    (x, t_B) = inputs()
    short = texts()[:, :2]
    longer = torch.cat([short, torch.zeros(5, 2, 5).double()], dim=1)
    assert torch.allclose(model(x, t_B, short), model(x, t_B, longer), atol=1e-12)
    assert not torch.allclose(model(x, t_B, short), model(x, t_B, longer + 1e-3), atol=1e-3)


def test_conditions_of_another_form_are_refused() -> None:
    x, t_B = inputs()
    spoilt = [
        (NoCondition(), torch.zeros(5, dtype=torch.int64)),
        (CLASSES, torch.zeros(4, dtype=torch.int64)),
        (CLASSES, torch.zeros(5)),
        (TEXT, torch.zeros(5, 4, 6).double()),
        (TEXT, torch.zeros(5, 5, 5).double()),
        (TEXT, torch.zeros(5, 0, 5).double()),
        (TEXT, torch.zeros(4, 4, 5).double()),
    ]
    for condition, c in spoilt:
        with pytest.raises(ShapeError):
            awake(condition=condition)(x, t_B, c)
    with pytest.raises(IndexError):
        awake(condition=CLASSES)(x, t_B, torch.full((5,), 3))


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


def flops_by_hand(architecture: Dit, shape: tuple[int, int, int], condition: Condition) -> int:
    """Two operations per product; backward is twice forward, but has no gradient with respect to what is given."""
    hidden = architecture.hidden
    depth = architecture.depth
    values = shape[0] * architecture.patch**2
    tokens = shape[1] * shape[2] // architecture.patch**2
    block = tokens * (3 + 1 + 4 + 4) * hidden**2 + 2 * tokens**2 * hidden
    once = 256 * hidden + hidden**2 + (6 * depth + 2) * hidden**2 + 2 * tokens * values * hidden
    input_products = tokens * values * hidden + 256 * hidden
    if isinstance(condition, TextCondition):
        words = condition.max_tokens
        dim = condition.dim
        block += (2 * tokens + 2 * words) * hidden**2 + 2 * tokens * words * hidden
        once += words * (dim * hidden + hidden**2)
        input_products += words * dim * hidden
    return 6 * (depth * block + once) - 2 * input_products


@pytest.mark.parametrize("condition", [NoCondition(), CLASSES, TEXT], ids=["none", "class", "text"])
@pytest.mark.parametrize(("architecture", "shape"), [(SMALL, (3, 4, 6)), (DEMO, (1, 8, 8))])
def test_training_flops_equal_those_counted_by_hand(
    architecture: Dit, shape: tuple[int, int, int], condition: Condition
) -> None:
    by_hand = flops_by_hand(architecture, shape, condition)
    assert training_flops(architecture, shape, 1, condition) == by_hand
    assert training_flops(architecture, shape, 7, condition) == 7 * by_hand


def test_training_flops_equal_those_that_torch_counts_of_a_batch() -> None:
    with torch.device("meta"):
        model = build_expert(SMALL, (3, 4, 6))
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(7, 3, 4, 6), torch.empty(7)).sum().backward()
    assert training_flops(SMALL, (3, 4, 6), 7) == counter.get_total_flops()
    assert training_flops(SMALL, (3, 4, 6), 8) != counter.get_total_flops()


def count(architecture: Dit, condition: Condition = NoCondition()) -> int:
    """Trained numbers on latents of 256 x 256 pictures, as published sizes are told."""
    return (
        sum(spec.bytes for spec in expected_tensors(architecture, (4, 32, 32), condition).values())
        // 4
    )


def test_class_conditional_sizes_differ_from_the_published_ones_by_positions_and_the_variance() -> (
    None
):
    imagenet = ClassCondition(num_classes=1000)
    positions = 256 * 1152
    variance = 4 * 2 * 2 * (1152 + 1)
    assert (
        count(Dit.published_size("XL/2"), imagenet)
        == 675_129_632 - positions - variance
        == 674_816_272
    )
    published = {
        "S/2": 33e6,
        "B/2": 130e6,
        "L/2": 458e6,
        "XL/2": 675e6,
        "XL/4": 675e6,
        "XL/8": 676e6,
    }
    for name, expected in published.items():
        assert count(Dit.published_size(name), imagenet) == pytest.approx(expected, rel=0.005)
    assert count(Dit.published_size("L/2"), imagenet) != pytest.approx(675e6, rel=0.005)


@pytest.mark.parametrize("name", ["S/2", "B/2", "L/2", "XL/2"])
def test_sizes_are_as_documented(name: str) -> None:
    conditions = (
        NoCondition(),
        ClassCondition(num_classes=1000),
        TextCondition(dim=768, max_tokens=77),
    )
    counts = " | ".join(
        f"{count(Dit.published_size(name), condition):,}" for condition in conditions
    )
    row = next(
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name} |")
    )
    assert row.endswith(f"| {counts} |")


def test_a_text_costs_cross_attention_in_every_block_and_its_own_embedding() -> None:
    reading = 28 * (4 * 1152**2 + 4 * 1152)
    embedding = (768 + 1) * 1152 + (1152 + 1) * 1152 + 1152
    with_text = count(Dit.published_size("XL/2"), TextCondition(dim=768, max_tokens=77))
    assert with_text - count(Dit.published_size("XL/2")) == reading + embedding
    assert with_text == 824_643_088


def test_size_that_was_not_published_is_refused() -> None:
    for name in ["XXL/2", "XL", "XL/3", "xl/2", ""]:
        with case(name=name), pytest.raises(ShapeError, check=has_subject("size of a DiT")):
            Dit.published_size(name)


def test_unconditional_weights_have_the_names_and_numbers_of_released_ones() -> None:
    """Sums of each tensor's numbers, written down when the first experts were released."""
    weights = build_expert(SMALL, (1, 4, 4), seed=3).state_dict()
    assert {name: float(value.double().sum()) for name, value in weights.items()} == pytest.approx(
        dict.fromkeys(weights, 0.0) | RELEASED, abs=1e-5
    )
    biases = {name.replace("weight", "bias") for name in RELEASED}
    assert set(weights) == RELEASED.keys() | biases


def test_initial_weights_are_a_function_of_the_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (
        build_expert(SMALL, (1, 4, 4), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [((1, 5, 4), SMALL), ((1, 4, 5), SMALL), ((4, 4), SMALL), ((1, 8, 8, 8, 8), SMALL)],
)
def test_architecture_is_refused_when_it_does_not_fit_the_shape(
    shape: tuple[int, ...], architecture: Dit
) -> None:
    with pytest.raises(ShapeError):
        build_expert(architecture, shape)
    with pytest.raises(ShapeError):
        expected_tensors(architecture, shape)


def test_volumes_are_sent_to_the_unet() -> None:
    with pytest.raises(ShapeError, check=has_subject("architecture dit")):
        build_expert(SMALL, (1, 8, 8, 8))


def test_images_or_times_of_another_shape_are_refused() -> None:
    model = build_expert(SMALL, (1, 4, 4))
    for x, t_B in (
        (torch.zeros(2, 1, 4, 6), torch.zeros(2)),
        (torch.zeros(2, 1, 4, 4), torch.zeros(3)),
    ):
        with pytest.raises(ShapeError):
            model(x, t_B)


@pytest.mark.parametrize(
    ("condition", "c"),
    [(CLASSES, torch.tensor([0, 2, -1, 1, 1])), (TEXT, texts().float())],
    ids=["class", "text"],
)
def test_conditional_dit_learns_in_bf16(condition: Condition, c: Tensor) -> None:
    model = awake(condition=condition).float()
    (x, t_B) = inputs()
    exact = model(x.float(), t_B.float(), c).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x.float(), t_B.float(), c)
    rough.float().square().mean().backward()
    assert all(
        weight.grad is not None and bool(weight.grad.isfinite().all())
        for weight in model.parameters()
    )
    assert 0 < float((rough.detach() - exact).norm() / exact.norm()) < 0.05
