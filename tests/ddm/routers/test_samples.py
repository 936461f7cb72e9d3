import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ddm.diffusion.path import LinearPath, Velocity
from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.routers import SamplesSettings
from ddm.routers import samples
from ddm.routers.base import Router, posterior
from ddm.routers.evaluation import cross_entropy
from ddm.routers.labelled import Labelled
from ddm.routers.samples import (
    SamplesRouter,
    draw_from_experts,
    fit_samples,
    samples_router_specs,
    training_flops,
)
from ddm.training.checkpoints import Checkpoints
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, UninformedRouter, four_silos

PATH = LinearPath()
SHAPE = (2, 1, 1)
SETTINGS = SamplesSettings(
    patch=1, hidden=32, depth=1, heads=2, num_steps=250, images_per_expert=300
)


class AsImages:
    """The exact router of the mixture, on points laid out as images."""

    num_experts = 4

    def __init__(self, mixture: GaussianMixture) -> None:
        self.mixture = mixture

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return self.mixture.log_likelihood(x_B.flatten(1).double(), t_B.double())


def _expert(mixture: GaussianMixture, k: int) -> Velocity:
    velocity = mixture.expert(k)
    return lambda x_B, t_B: velocity(x_B.flatten(1).double(), t_B.double()).to(x_B).view_as(x_B)


@pytest.fixture(scope="module")
def mixture() -> GaussianMixture:
    return four_silos()


@pytest.fixture(scope="module")
def drawn(mixture: GaussianMixture) -> Tensor:
    return draw_from_experts([_expert(mixture, k) for k in range(4)], SHAPE, 300, 0, PATH, None)


@pytest.fixture(scope="module")
def router(drawn: Tensor) -> SamplesRouter:
    return fit_samples(Labelled.drawn(drawn), SETTINGS, PATH, 0)


def test_each_expert_draws_its_own_silos_data(mixture: GaussianMixture, drawn: Tensor) -> None:
    assert drawn.shape == (4, 300, *SHAPE)
    for k in range(4):
        x = drawn[k].flatten(1).double()
        weight = mixture.weights_of(k) / mixture.weights_of(k).sum()
        mean = weight @ mixture.mean_CD
        spread = (weight @ (mixture.mean_CD.square() + mixture.variance_CD) - mean.square()).sqrt()
        assert float(((x.mean(0) - mean) / spread).abs().max()) < 5 / math.sqrt(300) + 0.05
        assert float((mixture.silo_of(x) == k).double().mean()) > 0.97


def test_trained_router_comes_close_to_the_exact_one(
    mixture: GaussianMixture, router: SamplesRouter
) -> None:
    x = mixture.draw(4000, seed=5)
    label = mixture.silo_of(x)
    x = x.float().view(-1, *SHAPE)
    prior = mixture.prior_K
    exact, ours, nothing = (
        cross_entropy(candidate, x, label, prior)
        for candidate in (AsImages(mixture), router, UninformedRouter(4))
    )
    for best, own, prior_alone in zip(exact[:4], ours[:4], nothing[:4], strict=True):
        assert own.value - best.value < 0.3 * (prior_alone.value - best.value)


def test_samples_router_answers_the_prior_at_pure_noise_after_its_file(
    router: SamplesRouter, tmp_path
) -> None:
    assert isinstance(router, Router)
    save_tensors(tmp_path / "router.safetensors", router.tensors())
    specs = samples_router_specs(4, SHAPE, SETTINGS)
    loaded = load_tensors(tmp_path / "router.safetensors", specs, max_bytes=1 << 20)
    again = SamplesRouter.from_tensors(loaded, 4, SHAPE, SETTINGS, PATH)
    x = 3 * torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert torch.equal(
        posterior(again, x, torch.ones(40), prior.log()), prior.log().softmax(0).expand(40, 4)
    )
    at = torch.full((40,), 0.5)
    assert torch.equal(again.log_likelihood(x, at), router.log_likelihood(x, at))
    assert float((posterior(again, x, at, prior.log()) - prior).abs().max()) > 0.3


def test_training_is_the_same_for_the_same_seed_and_reports_progress(drawn: Tensor) -> None:
    few = SETTINGS.model_copy(update={"num_steps": 20})
    seen = []
    one, two, other = (
        fit_samples(Labelled.drawn(drawn), few, PATH, s, lambda step, *_: seen.append(step))
        for s in (3, 3, 4)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.tensors().values(), two.tensors().values(), strict=True)
    )
    assert not torch.equal(one.tensors()["net.embed.weight"], other.tensors()["net.embed.weight"])
    assert seen[-1] == 20 and len(seen) == 30


def test_router_trained_in_bf16_is_as_good_and_auto_follows_the_machine(
    mixture: GaussianMixture, drawn: Tensor, router: SamplesRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = mixture.draw(2000, seed=5)
    label = mixture.silo_of(x)
    x = x.float().view(-1, *SHAPE)
    prior = mixture.prior_K

    def trained(precision: str, num_steps: int = 250) -> SamplesRouter:
        changes = {"precision": precision, "num_steps": num_steps}
        return fit_samples(Labelled.drawn(drawn), SETTINGS.model_copy(update=changes), PATH, 0)

    lower = trained("bf16")
    losses = [
        [band.value for band in cross_entropy(compared, x, label, prior)]
        for compared in (router, lower)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert not torch.equal(lower.net.head.weight, router.net.head.weight)
    assert {tensor.dtype for tensor in lower.tensors().values()} == {torch.float32}
    for has, same in (({"avx512_bf16": True}, "bf16"), ({}, "fp32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has)
        few = (trained("auto", 5), trained(same, 5))
        assert torch.equal(few[0].net.head.weight, few[1].net.head.weight)


def test_router_stays_untrained_where_experts_draw_the_same() -> None:
    same = torch.from_numpy(
        np.random.default_rng(0).standard_normal((1, 60, *SHAPE), dtype=np.float32)
    )
    few = SETTINGS.model_copy(update={"num_steps": 30})
    router = fit_samples(Labelled.drawn(same.repeat(3, 1, 1, 1, 1)), few, PATH, 0)
    w = router.log_likelihood(same[0], torch.full((60,), 0.3)).softmax(1)
    assert float((w - 1 / 3).abs().max()) < 0.1


def test_expert_that_draws_no_images_is_refused(drawn: Tensor) -> None:
    with pytest.raises(NumericalError, check=has_subject("expert 1")):
        draw_from_experts([lambda x, t: -x, lambda x, t: x * math.nan], SHAPE, 4, 0, PATH, None)
    with pytest.raises(ShapeError, check=has_subject("labelled images")):
        fit_samples(Labelled.drawn(drawn[:, :1]), SETTINGS, PATH, 0)


def test_training_flops_are_those_that_twice_the_steps_take_more(drawn: Tensor) -> None:
    counted = []
    for num_steps in (10, 20):  # with as many checks of the loss, which are no training
        settings = SETTINGS.model_copy(update={"num_steps": num_steps, "batch_size": 16})
        with FlopCounterMode(display=False) as counter:
            fit_samples(Labelled.drawn(drawn[:, :20]), settings, PATH, 0)
        counted.append(counter.get_total_flops())
    settings = SETTINGS.model_copy(update={"num_steps": 10, "batch_size": 16})
    # Ahead of time, on tensors without memory, attention is counted a little differently.
    assert training_flops(4, SHAPE, settings) == pytest.approx(counted[1] - counted[0], rel=0.02)


def test_training_goes_on_from_its_checkpoint_to_the_same_weights(
    drawn: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = SETTINGS.model_copy(update={"num_steps": 20})
    images = Labelled.drawn(drawn)
    uninterrupted = fit_samples(images, few, PATH, 3)
    checkpoints = Checkpoints(tmp_path / "run", "0" * 64)
    # One is due before every step.
    monkeypatch.setattr(samples, "CHECKPOINT_S", 0.0)

    def interrupt(step: int, total: int, loss: float) -> None:
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_samples(images, few, PATH, 3, interrupt, checkpoints=checkpoints)
    steps = []
    resumed = fit_samples(
        images, few, PATH, 3, lambda step, *_: steps.append(step), checkpoints=checkpoints
    )
    assert steps == [10, 12, 14, 16, 18, 20]
    for name, tensor in uninterrupted.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name
