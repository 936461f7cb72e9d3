import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ddm.errors import ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.routers import LearnedSettings
from ddm.routers.base import Router, SketchRouter, posterior
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import cross_entropy
from ddm.routers.learned import (
    LearnedRouter,
    SiloSketches,
    fit_learned,
    learned_router_specs,
    split_sketches,
)
from ddm.routers.refit import refit_shares
from ddm.routers.residual import PublicSketches, Residual
from ddm.routers.sketch import Sketch
from tests.support.errors import has_subject
from tests.support.router_problems import (
    GROUPS,
    PATH,
    RANK,
    RouterProblem,
    clustered_layout,
    make_problem,
)

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]
SETTINGS = LearnedSettings(hidden=16, depth=2, num_steps=60)
T_R = 0.6


def _vague(world: RouterProblem) -> CountsRouter:
    """A counts router that knows next to nothing: public shares, wide errors."""
    return CountsRouter(
        world.sketch(), torch.full((2, GROUPS), -np.log(GROUPS)), PATH, torch.full((2, GROUPS), 0.2)
    )


@pytest.fixture(scope="module")
def world() -> RouterProblem:
    return make_problem(SHARES, [400, 300])


def test_refitted_shares_are_the_maximum_that_a_general_optimiser_finds(
    world: RouterProblem,
) -> None:
    counts = _vague(world)
    released = list(world.released(counts.sketch, T_R).values())
    shares = refit_shares(counts, released, T_R).log_mass_KG.exp().numpy()
    at = torch.full((400,), T_R, dtype=torch.float64)
    density = counts.group_log_density(released[0].double(), at).exp().numpy()
    shape = (0.25 / 0.2) ** 2
    rate = 0.25 / 0.2**2

    def loss(mass: np.ndarray) -> float:
        return float(-np.log(density @ mass).sum() - (shape * np.log(mass) - rate * mass).sum())

    simplex = {"type": "eq", "fun": lambda mass: mass.sum() - 1}
    best = minimize(
        loss, np.full(GROUPS, 0.25), bounds=[(1e-9, 1)] * GROUPS, constraints=simplex, tol=1e-12
    )
    np.testing.assert_allclose(shares[0], best.x, atol=2e-4)
    assert loss(shares[0]) <= best.fun + 1e-6
    assert loss(np.full(GROUPS, 0.25)) > best.fun + 1  # where it started is not where it should end


def test_refitted_shares_recover_the_truth_that_the_counts_did_not_know(
    world: RouterProblem,
) -> None:
    counts = _vague(world)
    truth = (world.histogram() / torch.tensor(world.num_units)[:, None]).double()
    refitted = refit_shares(counts, list(world.released(counts.sketch, 0.1).values()), 0.1)
    assert float((refitted.log_mass_KG.exp() - truth).abs().max()) < 0.04
    assert float((counts.log_mass_KG.exp() - truth).abs().max()) > 0.3


def test_refitted_shares_stay_with_counts_that_are_certain(world: RouterProblem) -> None:
    sure = CountsRouter(
        world.sketch(), _vague(world).log_mass_KG, PATH, torch.full((2, GROUPS), 1e-4)
    )
    refitted = refit_shares(sure, list(world.released(sure.sketch, T_R).values()), T_R)
    torch.testing.assert_close(refitted.log_mass_KG, sure.log_mass_KG, atol=1e-3, rtol=0)


def test_refitted_router_is_better_for_every_t_when_counts_were_noisy(world: RouterProblem) -> None:
    counts = _vague(world)
    learned = refit_shares(counts, list(world.released(counts.sketch, 0.3).values()), 0.3)
    x = torch.cat(world.silos)
    label = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    before, after = (
        cross_entropy(router, x, label, world.num_units) for router in (counts, learned)
    )
    assert all(b.value < a.value for a, b in zip(before, after, strict=True))
    assert after[0].value < before[0].value - 0.05


def _with_loud_network(world: RouterProblem) -> LearnedRouter:
    mixture = _vague(world)
    residual = Residual(mixture.sketch, 2, 8, 1, PATH)
    with torch.no_grad():
        residual.layers[-1].bias.copy_(torch.tensor([5.0, -5.0]))
    return LearnedRouter(mixture, residual)


def _lessons(world: RouterProblem, counts: CountsRouter) -> PublicSketches:
    return PublicSketches.of(world.public, world.public_group, counts.sketch, PATH)


def test_network_is_silent_at_pure_noise_and_nowhere_else(world: RouterProblem) -> None:
    loud = _with_loud_network(world)
    assert isinstance(loud, Router)
    x = torch.cat(world.silos)[:100]
    quiet = loud.mixture
    for t, silent in [(0.0, False), (0.3, False), (0.9, False), (1.0, True)]:
        at = torch.full((100,), t)
        difference = loud.log_likelihood(x, at) - quiet.log_likelihood(x, at)
        moved = float((difference - difference.mean(1, keepdim=True)).abs().max())
        assert (moved < 1e-6) == silent, t


def test_learned_router_answers_the_prior_at_pure_noise_after_its_file(
    world: RouterProblem, tmp_path
) -> None:
    loud = _with_loud_network(world)
    save_tensors(tmp_path / "router.safetensors", loud.tensors())
    settings = LearnedSettings(hidden=8, depth=1, num_steps=1)
    specs = learned_router_specs((0, 1), loud.sketch, settings, PATH)
    tensors = load_tensors(tmp_path / "router.safetensors", specs, max_bytes=10_000)
    again = LearnedRouter.from_tensors(tensors, loud.sketch, settings, PATH, (0, 1))
    x = torch.cat(world.silos)[:30]
    prior = torch.tensor([0.8, 0.2])
    w = posterior(again, x, torch.ones(30), prior.log())
    torch.testing.assert_close(w, prior.expand(30, 2), atol=1e-6, rtol=0)
    at = torch.full((30,), 0.8)
    torch.testing.assert_close(
        again.log_likelihood(x, at), loud.log_likelihood(x, at), atol=1e-5, rtol=1e-5
    )


def test_training_is_the_same_for_the_same_seed_and_reports_progress(world: RouterProblem) -> None:
    counts = _vague(world)
    released = world.released(counts.sketch, T_R)
    seen: list[int] = []
    one, two = (
        fit_learned(
            counts,
            SiloSketches(released, world.num_units, T_R),
            _lessons(world, counts),
            SETTINGS,
            5,
            lambda step, *_: seen.append(step),
        )
        for _ in range(2)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.tensors().values(), two.tensors().values(), strict=True)
    )
    assert seen[-1] == SETTINGS.num_steps and len(seen) >= 20


def test_learned_router_beats_counts_where_these_were_noisy_and_says_what_changed(
    world: RouterProblem,
) -> None:
    counts = _vague(world)
    released = world.released(counts.sketch, 0.3)
    learned = fit_learned(
        counts, SiloSketches(released, world.num_units, 0.3), _lessons(world, counts), SETTINGS, 0
    )
    x = torch.cat(world.silos)
    label = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    before, after = (
        cross_entropy(router, x, label, world.num_units) for router in (counts, learned)
    )
    assert all(b.value < a.value for a, b in zip(before, after, strict=True))
    assert learned.differs(counts)
    silent = Residual(counts.sketch, 2, 8, 1, PATH)
    assert not LearnedRouter(counts, silent).differs(counts)


def test_split_keeps_every_sketch_exactly_once_and_holds_out_a_fifth(world: RouterProblem) -> None:
    released = world.released(_vague(world).sketch, T_R)
    train, held_out = split_sketches(released, 3)
    for silo, s in released.items():
        both = torch.cat([train[silo], held_out[silo]])
        assert torch.equal(both.sort(0).values, s.sort(0).values)
        assert len(held_out[silo]) == round(0.2 * len(s))
    with pytest.raises(ShapeError, check=has_subject("sketches of tiny")):
        split_sketches({"tiny": torch.zeros(1, RANK)}, 0)


def test_training_refuses_sketches_of_another_number_of_silos(world: RouterProblem) -> None:
    with pytest.raises(ShapeError):
        counts = _vague(world)
        lessons = _lessons(world, counts)
        fit_learned(
            counts, SiloSketches({"one": torch.zeros(5, RANK)}, [5], T_R), lessons, SETTINGS, 0
        )


def _released(
    world: RouterProblem, rank: int, t_r: float
) -> tuple[CountsRouter, dict[str, torch.Tensor]]:
    """A wide counts router that knows nothing, and sketches of its leading dimensions."""
    wide = Sketch.fit(world.public, world.public_group, 8, GROUPS, released_rank=rank)
    vague = CountsRouter(
        wide, torch.full((2, GROUPS), -np.log(GROUPS)), PATH, torch.full((2, GROUPS), 0.2)
    )
    return vague, world.released(wide.head(rank), t_r)


def test_refit_on_narrow_sketches_serves_the_wide_mixture(world: RouterProblem) -> None:
    counts, released = _released(world, RANK, 0.1)
    learned = fit_learned(
        counts, SiloSketches(released, world.num_units, 0.1), _lessons(world, counts), SETTINGS, 0
    )
    assert learned.mixture.sketch.rank == 8 and learned.head(RANK).sketch.rank == RANK
    truth = (world.histogram() / torch.tensor(world.num_units)[:, None]).double()
    assert float((learned.mixture.log_mass_KG.exp() - truth).abs().max()) < 0.04
    x = torch.cat(world.silos)
    label = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    # In the middle of t: near the data both know every sample's silo.
    wide, narrow = (
        cross_entropy(router, x, label, world.num_units)[2]
        for router in (learned, learned.head(RANK))
    )
    # the dimensions that nobody released still tell silos apart
    assert wide.value < narrow.value - 1e-4


def test_experts_of_a_silo_together_are_the_silo(world: RouterProblem) -> None:
    loud = _with_loud_network(world)
    assert isinstance(loud, SketchRouter)
    layout = clustered_layout()
    split = loud.split(layout)
    assert split.num_experts == 4
    _, share = layout.split(loud.mixture.log_mass_KG.exp())
    x = torch.cat(world.silos)[:40]
    at = torch.full((40,), 0.8)
    joint = split.log_likelihood(x, at).double() + share.log()
    together = torch.stack([joint[:, :2].logsumexp(1), joint[:, 2:].logsumexp(1)], 1)
    torch.testing.assert_close(together, loud.log_likelihood(x, at).double(), atol=1e-4, rtol=1e-5)
