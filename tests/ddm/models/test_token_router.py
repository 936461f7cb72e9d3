"""The transformer router: one learned token reads the image, and its answer is the token's alone."""

import pytest
import torch

from ddm.errors import ShapeError
from ddm.models import num_parameters
from ddm.models.token_router import TokenRouter
from ddm.protocol.architecture import ClassCondition, Dit, TextCondition

SMALL = Dit(patch=2, hidden=16, depth=2, heads=2)


def router_with_random_weights(**more: object) -> TokenRouter:
    router = TokenRouter(SMALL, (3, 4, 6), 4, **more).double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in router.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return router


def test_fresh_router_answers_zero_for_every_expert() -> None:
    router = TokenRouter(SMALL, (3, 4, 6), 4)
    assert torch.equal(router(torch.randn(2, 3, 4, 6), torch.rand(2)), torch.zeros(2, 4))


def test_answer_is_read_of_the_class_token_and_depends_on_the_image_and_the_time() -> None:
    router = router_with_random_weights()
    x = torch.randn(3, 3, 4, 6).double()
    t_B = torch.tensor([0.1, 0.5, 0.9]).double()
    tokens = router.tokens(x, t_B)
    assert tokens.shape == (3, 1 + 6, 16)
    assert torch.equal(router(x, t_B), router.head(tokens[:, 0]))
    for other in (router(x.flip(3), t_B), router(x, t_B.flip(0))[[0, 2]]):
        rows = router(x, t_B) if len(other) == 3 else router(x, t_B)[[0, 2]]
        assert not torch.allclose(other, rows, atol=1e-2)
    with torch.no_grad():
        router.class_token.mul_(-2.0)
    assert not torch.allclose(router.head(tokens[:, 0]), router(x, t_B), atol=1e-2)


def test_every_weight_of_the_router_learns() -> None:
    router = router_with_random_weights()
    router(torch.randn(3, 3, 4, 6).double(), torch.rand(3).double()).square().mean().backward()
    assert [
        name
        for name, weight in router.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ] == []


def test_router_takes_the_conditions_that_experts_take() -> None:
    x = torch.randn(2, 3, 4, 6).double()
    t_B = torch.rand(2).double()
    router = router_with_random_weights(condition=ClassCondition(num_classes=3))
    assert not torch.allclose(
        router(x, t_B, torch.tensor([0, 1])), router(x, t_B, torch.tensor([1, 2])), atol=1e-2
    )
    with pytest.raises(ShapeError):
        TokenRouter(SMALL, (3, 4, 4, 6), 4)


def test_shares_of_a_condition_need_no_image_and_are_none_without_one() -> None:
    text = torch.randn(3, 2, 5).double()
    text[2] = 0
    text[0, 1] = 0  # no text, and a padded one
    for labels, null, condition in (
        (torch.tensor([0, 2, -1]), torch.tensor([-1]), ClassCondition(num_classes=3)),
        (text, torch.zeros(1, 2, 5).double(), TextCondition(dim=5, max_tokens=2)),
    ):
        router = router_with_random_weights(condition=condition)
        shares = router.log_shares(labels, 3)
        assert shares.shape == (3, 4) and torch.equal(shares[2], torch.zeros(4).double())
        assert not torch.allclose(shares[0], shares[1], atol=1e-3)
        for none in (
            router.log_shares(null, 1),
            router.log_shares(None, 1),
            router_with_random_weights().log_shares(None, 1),
        ):
            assert torch.equal(none, torch.zeros(1, 4).double())
        alone = labels[:1, :1] if condition.kind == "text" else labels[:1]  # without its padding
        torch.testing.assert_close(router.log_shares(alone, 1), shares[:1])


def test_router_of_scale_b_weighs_what_the_explanation_says() -> None:
    with torch.device("meta"):
        plain = num_parameters(TokenRouter(Dit.published_size("B/2"), (4, 32, 32), 8))
        reading = num_parameters(
            TokenRouter(
                Dit.published_size("B/2"), (4, 32, 32), 8, TextCondition(dim=768, max_tokens=77)
            )
        )
    assert plain == 129_529_352
    assert reading == 159_065_872
    text_embedding = 2 * (768**2 + 768) + 768
    shares = 8 * 768 + 8
    assert reading - plain - text_embedding - shares == 12 * (4 * 768**2 + 4 * 768)
