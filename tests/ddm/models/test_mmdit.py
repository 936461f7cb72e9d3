"""The multimodal transformer against a plain reading of its definition, and what is claimed about its size and cost."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddm.errors import ShapeError
from ddm.models import build_expert, expected_tensors, training_flops
from ddm.models.layers import HeadNorm
from ddm.models.mmdit import MmditNetwork
from ddm.protocol.architecture import ClassCondition, Mmdit, NoCondition, TextCondition
from tests.support.case import case
from tests.support.errors import has_subject

TEXT = TextCondition(dim=5, max_tokens=4)
SHAPE = (3, 4, 6)


def small(shared_depth: int) -> Mmdit:
    return Mmdit(patch=2, hidden=16, depth=3, heads=2, shared_depth=shared_depth)


def awake(shared_depth: int) -> MmditNetwork:
    """A small model whose zero gates have been given values, in float64."""
    model = MmditNetwork(small(shared_depth), SHAPE, TEXT).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Five images, and texts of two tokens, of four, of none, of one, and one with a hole."""
    generator = torch.Generator().manual_seed(1)
    c = torch.randn(5, 4, 5, generator=generator, dtype=torch.float64)
    for i, empty in enumerate(([2, 3], [], [0, 1, 2, 3], [1, 2, 3], [0, 2])):
        c[i, empty] = 0
    return torch.randn(5, *SHAPE, generator=generator).double(), torch.linspace(0, 1, 5).double(), c


def normalised(token: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    centred = token - token.mean()
    return centred / (centred.square().mean() + 1e-6).sqrt() * (1 + scale) + shift


def scaled(part: Tensor, norm: HeadNorm) -> Tensor:
    heads = [
        head / (head.square().mean() + 1e-6).sqrt() * (1 + norm.scale) for head in part.split(8)
    ]
    return torch.cat(heads)


def read(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of one query, head by head."""
    heads = []
    for head in (slice(0, 8), slice(8, 16)):
        logits = torch.stack([query[head] @ key[head] / 8**0.5 for key in keys])
        heads.append(logits.softmax(dim=0) @ torch.stack([value[head] for value in values]))
    return torch.cat(heads)


def plain_mmdit(model: MmditNetwork, image: Tensor, t: Tensor, c: Tensor) -> Tensor:
    """The definition for one image and the tokens of its text alone."""
    patches = image.reshape(3, 2, 2, 3, 2).permute(1, 3, 0, 2, 4).reshape(6, 12)
    image_tokens = [
        model.embed(patch) + position
        for patch, position in zip(patches, model.position_ND, strict=True)
    ]
    text_tokens = [model.text.mlp(vector) for vector in c if bool(vector.any())]
    if not text_tokens:
        text_tokens = [model.text.null]
    angle = t * model.time.frequencies
    condition = model.time.mlp(torch.cat([angle.cos(), angle.sin()]))
    condition = condition + model.pooled(torch.stack(text_tokens).mean(0))
    modulations = list(model.modulation(F.silu(condition)).split(16))

    def take(num: int) -> list[Tensor]:
        return [modulations.pop(0) for _ in range(num)]

    for block in model.joint:
        image_modulation = take(6)
        text_modulation = take(6 if block.updates_text else 2)
        image_kvq = [
            block.image.qkv(normalised(token, *image_modulation[:2])).split(16)
            for token in image_tokens
        ]
        text_kvq = [
            block.text.qkv(normalised(token, *text_modulation[:2])).split(16)
            for token in text_tokens
        ]
        keys = [scaled(kvq[0], block.image.norms[0]) for kvq in image_kvq]
        keys += [scaled(kvq[0], block.text.norms[0]) for kvq in text_kvq]
        values = [kvq[1] for kvq in image_kvq + text_kvq]
        updated = [(block.image, image_tokens, image_kvq, image_modulation)]
        if block.updates_text:
            updated.append((block.text, text_tokens, text_kvq, text_modulation))
        for stream, tokens, kvqs, (_, _, gate_a, shift, scale, gate_m) in updated:
            for i, token in enumerate(tokens):
                mixed = read(scaled(kvqs[i][2], stream.norms[1]), keys, values)
                token = token + gate_a * stream.project(mixed)
                widened = F.gelu(stream.up(normalised(token, shift, scale)))
                tokens[i] = token + gate_m * stream.down(widened)
    for block in model.shared:
        shift, scale, gate = take(3)
        wide = [
            block.wide(normalised(token, shift, scale)).split([16, 16, 16, 64])
            for token in image_tokens + text_tokens
        ]
        keys = [scaled(key, block.norms[0]) for key, _, _, _ in wide]
        values = [value for _, value, _, _ in wide]
        updates = []
        for _, _, query, up in wide:
            mixed = read(scaled(query, block.norms[1]), keys, values)
            updates.append(gate * block.narrow(torch.cat([mixed, F.gelu(up)])))
        num_image = len(image_tokens)
        image_tokens = [
            token + update for token, update in zip(image_tokens, updates[:num_image], strict=True)
        ]
        text_tokens = [
            token + update for token, update in zip(text_tokens, updates[num_image:], strict=True)
        ]
    out = torch.stack([model.head(normalised(token, *modulations)) for token in image_tokens])
    return out.reshape(2, 3, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(SHAPE)


@pytest.mark.parametrize("shared_depth", [0, 1, 3])
def test_mmdit_equals_its_definition_written_out(shared_depth: int) -> None:
    model = awake(shared_depth)
    (x, t_B, c) = inputs()
    with torch.no_grad():
        expected = torch.stack([plain_mmdit(model, *one) for one in zip(x, t_B, c, strict=True)])
        assert torch.allclose(model(x, t_B, c), expected, atol=1e-10)
        for wrong in (model(x, t_B, c.roll(1, 0)), model(x, t_B.flip(0), c)[[0, 1, 3, 4]]):
            rows = expected if len(wrong) == 5 else expected[[0, 1, 3, 4]]
            assert bool(((wrong - rows).flatten(1).abs().amax(1) > 1e-2).all())


@pytest.mark.parametrize("shared_depth", [0, 3])
def test_padding_is_not_read_and_no_text_is_one_learned_token(shared_depth: int) -> None:
    model = awake(shared_depth)
    (x, t_B, c) = inputs()
    longer = torch.cat([c[:, :2], torch.zeros(5, 2, 5).double()], dim=1)
    assert torch.allclose(model(x, t_B, c[:, :2]), model(x, t_B, longer), atol=1e-12)
    assert not torch.allclose(model(x, t_B, c[:, :2]), model(x, t_B, longer + 1e-2), atol=1e-3)
    assert torch.allclose(model(x, t_B), model(x, t_B, torch.zeros_like(c)), atol=1e-12)
    assert not torch.allclose(model(x, t_B), model(x, t_B, c), atol=1e-2)


@pytest.mark.parametrize("shared_depth", [0, 1, 3])
def test_every_weight_learns_and_a_fresh_model_answers_zero(shared_depth: int) -> None:
    fresh = build_expert(small(shared_depth), SHAPE, condition=TEXT)
    (x, t_B, c) = inputs()
    assert torch.equal(fresh(x.float(), t_B.float(), c.float()), torch.zeros(5, *SHAPE))
    model = awake(shared_depth)
    model(x, t_B, c).square().mean().backward()
    assert [
        name
        for name, weight in model.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ] == []


def test_mmdit_learns_in_bf16() -> None:
    model = awake(1).float()
    (x, t_B, c) = inputs()
    exact = model(x.float(), t_B.float(), c.float()).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x.float(), t_B.float(), c.float())
    rough.float().square().mean().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    assert 0 < float((rough.detach() - exact).norm() / exact.norm()) < 0.05


def test_mmdit_without_a_text_or_for_volumes_is_refused_and_names_what_to_take() -> None:
    for condition in (NoCondition(), ClassCondition(num_classes=3)):
        with pytest.raises(ShapeError, check=has_subject("architecture mmdit")):
            build_expert(small(0), SHAPE, condition=condition)
    with pytest.raises(ShapeError, check=has_subject("architecture mmdit")):
        build_expert(small(0), (1, 4, 4, 4), condition=TEXT)


def flops_by_hand(architecture: Mmdit) -> int:
    """Two operations per product; backward is twice forward, but has no gradient with respect to what is given."""
    hidden = architecture.hidden
    depth = architecture.depth
    words = 4
    seen = 6
    both = seen + words
    num_joint = depth - architecture.shared_depth
    products = num_joint * (both * 12 * hidden**2 + 2 * both**2 * hidden)
    products += architecture.shared_depth * (both * 12 * hidden**2 + 2 * both**2 * hidden)
    modulations = 12 * num_joint + 3 * architecture.shared_depth + 2
    if not architecture.shared_depth:  # the last block's text tokens are only read
        products -= words * 10 * hidden**2 + 2 * words * both * hidden
        modulations -= 4
    products += (modulations + 1 + 1) * hidden**2 + words * hidden**2 + seen * 12 * hidden
    input_products = seen * 12 * hidden + 256 * hidden + words * 5 * hidden
    return 6 * products + 4 * input_products


@pytest.mark.parametrize("shared_depth", [0, 1, 3])
def test_training_flops_equal_those_counted_by_hand(shared_depth: int) -> None:
    by_hand = flops_by_hand(small(shared_depth))
    assert training_flops(small(shared_depth), SHAPE, 1, TEXT) == by_hand
    assert training_flops(small(shared_depth), SHAPE, 3, TEXT) == 3 * by_hand


def test_sizes_to_three_billion_are_as_documented() -> None:
    for hidden, depth, heads, shared_depth, expected in [
        (1536, 24, 24, 0, 2_025_188_352),  # Stable Diffusion 3 medium, published as 2B
        (1664, 30, 26, 0, 2_974_444_288),
        (2560, 30, 20, 30, 2_994_232_384),
        (2560, 30, 20, 29, 3_131_906_880),
        (2560, 30, 20, 0, 7_032_688_576),
    ]:
        with case(
            hidden=hidden, depth=depth, heads=heads, shared_depth=shared_depth, expected=expected
        ):
            architecture = Mmdit(
                patch=2, hidden=hidden, depth=depth, heads=heads, shared_depth=shared_depth
            )
            t5 = TextCondition(dim=4096, max_tokens=77)
            tensors = expected_tensors(architecture, (16, 32, 32), t5)
            assert sum(spec.bytes for spec in tensors.values()) // 4 == expected
            row = f"| {hidden} | {depth} | {heads} | {shared_depth} | {expected:,} |"
            assert row in (
                Path(__file__).parents[3] / "docs" / "explanation" / "architectures.md"
            ).read_text("utf-8")
            # times the width squared, without the ends
            weights = 36 * (depth - shared_depth) + 15 * shared_depth
            assert expected == pytest.approx(weights * hidden**2, rel=0.02)
