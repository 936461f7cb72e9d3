"""What one silo claims of itself must not decide what the router says of two others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddm.errors import MathError
from ddm.protocol.routers import LearnedSettings
from ddm.routers.calibration import calibrate
from ddm.routers.counts import CountsRouter
from ddm.routers.influence import capped_shares
from ddm.routers.learned import SiloSketches, fit_learned
from ddm.routers.public import Evidence, PublicData
from ddm.routers.refit import refit_shares
from ddm.routers.residual import PublicSketches, fit_residual
from ddm.routers.sketch import Sketch
from tests.ddm.routers.test_residual import SETTINGS, _two_lobes
from tests.support.router_problems import (
    PATH,
    OverconfidentRouter,
    RouterProblem,
    make_problem,
    one_expert_per_silo,
)

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.05, 0.25, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
HONEST = 300
BOLD = 10**9
NO_CAP = 1.0
CAP = 0.5


@pytest.fixture(scope="module")
def world() -> RouterProblem:
    return make_problem(SHARES, [600, 300, HONEST])


def _claims(world: RouterProblem, claim: int) -> tuple[Tensor, list[int]]:
    """The third silo states that many units, all in the first group."""
    histogram = world.histogram().clone()
    histogram[2] = torch.tensor([claim, 0, 0, 0])
    return histogram, [600, 300, claim]


def _temperature(world: RouterProblem, claim: int, cap: float) -> float:
    histogram, num_units = _claims(world, claim)
    shares = capped_shares(num_units, cap)
    counts = CountsRouter.from_counts(world.sketch(), histogram, num_units, 20.0, PATH)
    evidence = Evidence(histogram, num_units, 20.0, one_expert_per_silo(3), shares)
    public = PublicData(world.public, world.public_group, evidence, shares, PATH, seed=0)
    return calibrate(OverconfidentRouter(counts, 3.0), public).temperature


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=12), st.floats(0.05, 1.0))
def test_no_share_exceeds_the_cap_and_the_order_stays(num_units: list[int], cap: float) -> None:
    shares = capped_shares(num_units, cap)
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) <= max(cap, 1 / len(num_units)) * (1 + 1e-9)
    assert sorted(range(len(shares)), key=lambda k: (num_units[k], k)) == sorted(
        range(len(shares)), key=lambda k: (round(shares[k], 12), num_units[k], k)
    )


def test_shares_below_the_cap_stay_as_they_are() -> None:
    assert capped_shares([6, 3, 1], 0.6) == pytest.approx((0.6, 0.3, 0.1))
    assert capped_shares([6, 3, 1], 0.5) == pytest.approx((0.5, 0.375, 0.125))


@pytest.mark.parametrize(
    ("num_units", "cap"), [([1, 2], 0.0), ([1, 2], 1.5), ([0, 2], 0.5), ([], 0.5)]
)
def test_shares_of_nobody_or_a_cap_out_of_range_are_refused(
    num_units: list[int], cap: float
) -> None:
    with pytest.raises(MathError):
        capped_shares(num_units, cap)


def test_likelihoods_of_two_silos_do_not_depend_on_what_a_third_claims(
    world: RouterProblem,
) -> None:
    """Counts and refit need no cap: each silo's mixture is made of its own releases."""
    masses = []
    for claim in (HONEST, BOLD):
        histogram, num_units = _claims(world, claim)
        counts = CountsRouter.from_counts(world.sketch(), histogram, num_units, 1.0, PATH)
        released = list(world.released(counts.sketch, 0.5).values())
        masses += [(counts.log_mass_KG[:2], refit_shares(counts, released, 0.5).log_mass_KG[:2])]
    assert all(torch.equal(honest, bold) for honest, bold in zip(*masses, strict=True))


def test_temperature_stays_when_a_silo_claims_a_billion_units_only_under_the_cap(
    world: RouterProblem,
) -> None:
    """The temperature scales every log odds, so those of two other silos may move by 5%; without the cap, threefold."""
    honest = _temperature(world, HONEST, CAP)
    assert honest == pytest.approx(3.0, rel=0.05)
    assert _temperature(world, BOLD, CAP) == pytest.approx(honest, rel=0.05)
    assert _temperature(world, BOLD, NO_CAP) == 1.0


def test_network_still_tells_two_silos_apart_when_a_third_claims_a_billion_units_only_under_the_cap() -> (
    None
):
    public, group = _two_lobes(1200, seed=0)
    sketch = Sketch.fit(public, group, 2, 2)
    shares = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    mixture = CountsRouter(sketch, shares.log(), PATH)
    lessons = PublicSketches.of(public, group, sketch, PATH)

    def odds(claim: int, cap: float) -> Tensor:
        """What the network adds to the log odds of the first two silos at public images, t = 0.1."""
        prior = torch.tensor(capped_shares([HONEST, HONEST, claim], cap))
        residual = fit_residual(mixture, lessons, prior, SETTINGS, seed=0)
        added = residual(lessons.s_NR, torch.full((len(lessons.s_NR),), 0.1))
        return added[:, 0] - added[:, 1]

    honest = odds(HONEST, CAP)
    bold = odds(BOLD, CAP)
    size = float(honest.abs().mean())
    assert size > 0.3
    assert float((bold - honest).abs().mean()) < 0.2 * size
    # more than all others together state buys nothing
    assert torch.equal(bold, odds(2 * HONEST, CAP))
    assert float((odds(BOLD, NO_CAP) - honest).abs().mean()) > 0.8 * size


def test_learned_router_teaches_its_network_with_the_shares_it_is_given() -> None:
    public, group = _two_lobes(800, seed=0)
    sketch = Sketch.fit(public, group, 2, 2)
    mixture = CountsRouter(sketch, torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log(), PATH)
    lessons = PublicSketches.of(public, group, sketch, PATH)
    released = {name: torch.zeros(4, 2) for name in ("one", "two")}
    settings = LearnedSettings(hidden=8, depth=1, num_steps=60)

    def network(shares: list[float] | None) -> Tensor:
        fitted = fit_learned(
            mixture, SiloSketches(released, [30, 10], 0.5, shares), lessons, settings, 0
        )
        return torch.cat([weight.flatten() for weight in fitted.residual.parameters()])

    assert torch.equal(network(None), network([0.75, 0.25]))
    assert not torch.equal(network(None), network([0.5, 0.5]))
