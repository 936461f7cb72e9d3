import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ddm.errors import ShapeError
from ddm.protocol.plan import LearnedRouter as Settings
from ddm.routers.base import Router, posterior
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import cross_entropy
from ddm.routers.learned import (
    LearnedRouter,
    Residual,
    fit_learned,
    learned_router_specs,
    refit_shares,
    split_sketches,
)
from ddm.tensors import load_tensors, save_tensors
from tests.ddm.routers.worlds import GROUPS, PATH, RANK, World, make_world

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]
SETTINGS = Settings(hidden=16, depth=2, num_steps=60)
T_R = 0.6


def _vague(world: World) -> CountsRouter:
    """A counts router that knows next to nothing: public shares, wide errors."""
    return CountsRouter(world.sketch(), torch.full((2, GROUPS), -np.log(GROUPS)), PATH, torch.full((2, GROUPS), 0.2))


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(SHARES, [400, 300])


def test_refitted_shares_are_the_maximum_that_a_general_optimiser_finds(world: World) -> None:
    counts = _vague(world)
    released = list(world.released(counts.sketch, T_R).values())
    found = refit_shares(counts, released, world.num_units, T_R).log_mass_KG.exp().numpy()
    at = torch.full((400,), T_R, dtype=torch.float64)
    density = counts.group_log_density(released[0].double(), at).exp().numpy()
    shape, rate = (0.25 / 0.2) ** 2, 0.25 / 0.2**2

    def loss(mass: np.ndarray) -> float:
        return float(-np.log(density @ mass).sum() - (shape * np.log(mass) - rate * mass).sum())

    simplex = {"type": "eq", "fun": lambda mass: mass.sum() - 1}
    best = minimize(loss, np.full(GROUPS, 0.25), bounds=[(1e-9, 1)] * GROUPS, constraints=simplex, tol=1e-12)
    np.testing.assert_allclose(found[0], best.x, atol=2e-4)
    assert loss(found[0]) <= best.fun + 1e-6
    assert loss(np.full(GROUPS, 0.25)) > best.fun + 1  # where it started is not where it should end


def test_refitted_shares_recover_the_truth_that_the_counts_did_not_know(world: World) -> None:
    counts = _vague(world)
    truth = (world.histogram() / torch.tensor(world.num_units)[:, None]).double()
    refitted = refit_shares(counts, list(world.released(counts.sketch, 0.1).values()), world.num_units, 0.1)
    assert float((refitted.log_mass_KG.exp() - truth).abs().max()) < 0.04
    assert float((counts.log_mass_KG.exp() - truth).abs().max()) > 0.3


def test_refitted_shares_stay_with_counts_that_are_certain(world: World) -> None:
    sure = CountsRouter(world.sketch(), _vague(world).log_mass_KG, PATH, torch.full((2, GROUPS), 1e-4))
    refitted = refit_shares(sure, list(world.released(sure.sketch, T_R).values()), world.num_units, T_R)
    torch.testing.assert_close(refitted.log_mass_KG, sure.log_mass_KG, atol=1e-3, rtol=0)


def test_refitted_router_is_better_for_every_t_when_counts_were_noisy(world: World) -> None:
    counts = _vague(world)
    learned = refit_shares(counts, list(world.released(counts.sketch, 0.3).values()), world.num_units, 0.3)
    x, label = torch.cat(world.silos), torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    before, after = (cross_entropy(router, x, label, world.num_units) for router in (counts, learned))
    assert all(b.value < a.value for a, b in zip(before, after, strict=True))
    assert after[0].value < before[0].value - 0.05


def _with_loud_network(world: World, t_release: float = T_R) -> LearnedRouter:
    residual = Residual(RANK, 2, 8, 1)
    with torch.no_grad():
        residual.layers[-1].bias.copy_(torch.tensor([5.0, -5.0]))
    return LearnedRouter(_vague(world), residual, t_release)


def test_network_is_silent_below_t_release_and_at_pure_noise(world: World) -> None:
    loud = _with_loud_network(world)
    assert isinstance(loud, Router)
    x = torch.cat(world.silos)[:100]
    quiet = loud.mixture
    for t, silent in [(0.0, True), (0.3, True), (T_R, True), (1.0, True), (0.8, False), (0.95, False)]:
        at = torch.full((100,), t)
        difference = loud.log_likelihood(x, at) - quiet.log_likelihood(x, at)
        moved = float((difference - difference.mean(1, keepdim=True)).abs().max())
        assert (moved < 1e-6) == silent, t


def test_network_rises_without_a_jump_at_t_release(world: World) -> None:
    loud = _with_loud_network(world)
    s = torch.zeros(1, RANK)
    steps = torch.linspace(T_R - 0.01, 1.0, 400)
    values = torch.cat([loud.correction(s, t.view(1)) for t in steps])[:, 0]
    assert float(values.diff().abs().max()) < 0.15
    assert float(values.max()) > 3


def test_learned_router_answers_the_prior_at_pure_noise_after_its_file(world: World, tmp_path) -> None:
    loud = _with_loud_network(world)
    save_tensors(tmp_path / "router.safetensors", loud.tensors())
    settings = Settings(hidden=8, depth=1, num_steps=1)
    specs = learned_router_specs(2, GROUPS, RANK, settings)
    tensors = load_tensors(tmp_path / "router.safetensors", specs, max_bytes=10_000)
    again = LearnedRouter.from_tensors(tensors, loud.mixture.sketch, settings, PATH, T_R)
    x = torch.cat(world.silos)[:30]
    prior = torch.tensor([0.8, 0.2])
    w = posterior(again, x, torch.ones(30), prior.log())
    torch.testing.assert_close(w, prior.expand(30, 2), atol=1e-6, rtol=0)
    at = torch.full((30,), 0.8)
    torch.testing.assert_close(again.log_likelihood(x, at), loud.log_likelihood(x, at), atol=1e-5, rtol=1e-5)


def test_training_is_the_same_for_the_same_seed_and_reports_progress(world: World) -> None:
    counts = _vague(world)
    released = world.released(counts.sketch, T_R)
    seen: list[int] = []
    one, two = (
        fit_learned(
            counts, released, world.num_units, SETTINGS, PATH, 5, lambda step, *_: seen.append(step), t_release=T_R
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.tensors().values(), two.tensors().values(), strict=True))
    assert seen[-1] == SETTINGS.num_steps and len(seen) >= 20


def test_network_learns_what_no_histogram_shows() -> None:
    shifted = make_world([[0.25] * 4, [0.25] * 4], [600, 600], shift=1.5)
    sketch = shifted.sketch()
    counts = CountsRouter.from_counts(sketch, shifted.histogram(), shifted.num_units, 5.0, PATH)
    train, held_out = split_sketches(shifted.released(sketch, 0.3), 0)
    settings = Settings(hidden=16, depth=2, num_steps=300)
    learned = fit_learned(counts, train, shifted.num_units, settings, PATH, 0, t_release=0.3)
    assert learned.residual.speaks
    losses = []
    for router in (counts, learned):
        total = 0.0
        for k, s in enumerate(held_out.values()):
            at = torch.full((len(s),), 0.5)
            moved = sketch.renoise(s, 0.3, at, PATH, torch.Generator().manual_seed(1))
            total -= float(router.sketch_log_likelihood(moved, at).log_softmax(1)[:, k].mean()) / 2
        losses.append(total)
    assert losses[1] < losses[0] - 0.02


def test_network_is_set_back_to_silence_when_sketches_carry_nothing() -> None:
    same = make_world([[0.25] * 4, [0.25] * 4], [120, 40])
    counts = CountsRouter.from_counts(same.sketch(), same.histogram(), same.num_units, 5.0, PATH)
    released = same.released(counts.sketch, 0.97)
    learned = fit_learned(counts, released, same.num_units, SETTINGS, PATH, 0, t_release=0.97)
    assert not learned.residual.speaks


def test_split_keeps_every_sketch_exactly_once_and_holds_out_a_fifth(world: World) -> None:
    released = world.released(_vague(world).sketch, T_R)
    train, held_out = split_sketches(released, 3)
    for silo, s in released.items():
        both = torch.cat([train[silo], held_out[silo]])
        assert torch.equal(both.sort(0).values, s.sort(0).values)
        assert len(held_out[silo]) == round(0.2 * len(s))
    with pytest.raises(ShapeError, match="at least 2"):
        split_sketches({"tiny": torch.zeros(1, RANK)}, 0)


def test_training_refuses_sketches_of_another_number_of_silos(world: World) -> None:
    with pytest.raises(ShapeError):
        fit_learned(_vague(world), {"one": torch.zeros(5, RANK)}, [5], SETTINGS, PATH, 0, t_release=T_R)
