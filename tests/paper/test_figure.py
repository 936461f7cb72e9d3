"""The figure's own rules: what a target counts as evidence, what a measurement is, what a stopped run takes up."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.routers.base import posterior
from examples.paper.privacy.experiment import read_result
from examples.paper.privacy.families import as_published, fit_exact
from examples.paper.privacy.measure import TIMES, measure
from examples.paper.privacy.public import fit_public_parts
from examples.paper.privacy.reference import Bench
from examples.paper.privacy.results import FamilyRecord, SeedResult, Shares, presets_for
from examples.paper.privacy.shares import Confused, PriorOnly, sampling_error, total_variation
from examples.paper.privacy.targets import check_targets, interval, reference_gain
from examples.paper.privacy.worlds import DATASETS, PrivateWorld, make_world


@pytest.fixture(scope="module")
def world() -> PrivateWorld:
    return make_world(DATASETS["digits"], None, seed=0)


def _record(
    family: str, epsilon: float | None, gain: float, difference: float = 0.0
) -> FamilyRecord:
    return FamilyRecord(
        family=family,
        epsilon=epsilon,
        draw=0,
        loss_T=(0.0,),
        gain=gain,
        accuracy_T=(0.0,),
        share_error_T=(0.0,),
        difference_T=(difference,),
        difference_error_T=(0.0,),
    )


def _seed(seed: int, *records: FamilyRecord) -> SeedResult:
    exact = _record("exact counts, not private", None, 0.4)
    network = _record("network, not private", None, 0.5)
    return SeedResult(
        seed=seed,
        commit="0",
        presets=presets_for("digits", quick=True),
        records=(exact, network, *records),
        shares=(),
        empirical=(),
        reidentification=None,
    )


def test_draws_of_one_seed_are_no_further_evidence() -> None:
    differences = (-0.0040, -0.0001, -0.0065)
    seeds = [
        _seed(number, *[_record("learned", 4.0, 0.4, difference)] * 2)
        for number, difference in enumerate(differences)
    ]
    (learned,) = check_targets("digits", seeds)
    assert learned.low == pytest.approx(-0.0115, abs=1e-4)
    assert learned.high == pytest.approx(0.0045, abs=1e-4)
    assert learned.note == "better at 0 of 1 t"
    as_if_independent = interval(differences * 2)
    assert as_if_independent[2] < 0  # what counting draws would have claimed


def test_learned_router_that_is_worse_at_every_seed_misses_its_target() -> None:
    seeds = [
        _seed(number, _record("learned", 4.0, 0.4, 0.01 + 0.001 * number)) for number in range(3)
    ]
    assert not check_targets("digits", seeds)[0].met


def test_gain_is_held_against_the_better_reference_of_the_same_seed() -> None:
    records = [_record("counts", epsilon, 0.45) for epsilon in (0.3, 1.0)] + [
        _record("learned", 4.0, 0.4)
    ]
    seeds = [_seed(number, *records) for number in range(2)]
    assert reference_gain(seeds[0]) == 0.5
    at_one, at_a_third, *_ = check_targets("fashion-mnist", seeds)
    assert at_one.value == pytest.approx(0.9) and not at_one.met
    assert at_a_third.value == pytest.approx(0.9) and at_a_third.met


def test_prior_is_measured_as_its_closed_form_and_exact_counts_beat_it(world: PrivateWorld) -> None:
    prior = measure(None, world)
    expected = -float((world.soft_NK * world.prior_K.log()).sum(1).mean())
    assert prior.loss_T == pytest.approx([expected] * len(TIMES))
    parts = fit_public_parts(world, "pca", 0, 0, lambda message: None)
    exact = measure(fit_exact(world, parts).router, world)
    assert exact.loss_T[0] < expected - 0.05
    assert exact.loss_T[-1] == pytest.approx(expected, abs=0.02)
    assert exact.accuracy_T[0] > prior.accuracy_T[0]


def test_router_counts_as_it_is_where_noise_leaves_nothing_to_fit_its_temperature_on(
    world: PrivateWorld,
) -> None:
    parts = fit_public_parts(world, "pca", 0, 0, lambda message: None)
    exact = fit_exact(world, parts)
    one_group = replace(parts, held_out_group_N=torch.zeros_like(parts.held_out_group_N))
    noisy_KG = exact.evidence.noisy_KG.clone()
    noisy_KG[:, 0] = -(10**4)
    drowned = replace(exact, evidence=replace(exact.evidence, noisy_KG=noisy_KG, epsilon=0.1))
    assert as_published(drowned, world, one_group, seed=0).temperature == 1.0
    assert as_published(exact, world, parts, seed=0).num_experts == exact.router.num_experts


def test_shares_of_the_same_law_differ_by_no_more_than_the_sampling_error_and_permuted_ones_do() -> (
    None
):
    share_K = np.array([0.5, 0.3, 0.2])
    num = 1000
    rng = np.random.default_rng(1)
    limit = sampling_error(share_K, num, seed=0)
    pairs = [[rng.multinomial(num, share_K) / num for _ in range(2)] for _ in range(400)]
    over = np.mean([total_variation(*pair) > limit for pair in pairs])
    assert 0.02 < over < 0.09
    assert total_variation(share_K, share_K[::-1]) > 3 * limit


@pytest.mark.parametrize(
    ("within", "control", "met"), [(0.1, 0.3, True), (0.25, 0.3, False), (0.1, 0.15, False)]
)
def test_shares_within_clusters_show_nothing_where_a_control_does_not_stand_out(
    within: float, control: float, met: bool
) -> None:
    shares = Shares(
        strategy="full",
        distance=0.0,
        sampling_error=0.1,
        within=within,
        within_error=0.2,
        controls={"prior only": control, "silos confused": 0.5},
    )
    seed = _seed(0, _record("learned", 4.0, 0.4)).model_copy(update={"shares": (shares,)})
    marginal, inside = [
        target for target in check_targets("digits", [seed]) if "shar" in target.figure
    ]
    assert (marginal.met, inside.met) == (True, met)


def test_controls_of_the_shares_know_nothing_or_the_wrong_silo(world: PrivateWorld) -> None:
    exact = fit_exact(world, fit_public_parts(world, "pca", 0, 0, lambda message: None)).router
    x_B = world.test[:50]
    t_B = torch.full((50,), 0.1)
    log_prior_K = world.prior_K.log()
    nothing = posterior(PriorOnly(len(world.silos)), x_B, t_B, log_prior_K)
    assert torch.allclose(nothing.double(), world.prior_K.expand(50, -1))
    answer_BK, confused_BK = (
        router.log_likelihood(x_B, t_B) for router in (exact, Confused(exact))
    )
    assert torch.equal(confused_BK[:, 1:], answer_BK[:, :-1])
    assert not torch.allclose(confused_BK, answer_BK)


def test_network_beside_a_router_is_that_router_before_training(world: PrivateWorld) -> None:
    exact = fit_exact(world, fit_public_parts(world, "pca", 0, 0, lambda message: None)).router
    untrained = Bench(world, 0).beside(exact, 1, lambda message: None)
    ours = measure(untrained, world)
    theirs = measure(exact, world)
    assert ours.loss_T == pytest.approx(theirs.loss_T, abs=0.02)


def test_stopped_run_takes_up_what_was_kept_and_measures_again_what_it_cannot_read(
    tmp_path: Path,
) -> None:
    kept = _seed(0, _record("learned", 4.0, 0.4))
    (tmp_path / "0.json").write_text(kept.model_dump_json())
    assert read_result(tmp_path / "0.json") == kept
    older = json.loads(kept.model_dump_json())
    del older["commit"]
    (tmp_path / "1.json").write_text(json.dumps(older))
    assert read_result(tmp_path / "1.json") is None


def test_owners_of_images_follow_from_their_classes_alone(world: PrivateWorld) -> None:
    assert torch.allclose(world.soft_NK.sum(1), torch.ones(len(world.test), dtype=torch.float64))
    assert len(torch.unique(world.soft_NK, dim=0)) == 10
    assert sum(world.num_units) == DATASETS["digits"].num_private


def test_groups_without_labels_have_a_target_of_their_own_where_they_were_measured() -> None:
    records = [_record("counts", epsilon, 0.5) for epsilon in (0.3, 1.0)] + [
        _record("learned", 4.0, 0.4)
    ]
    without = [_seed(number, *records) for number in range(2)]
    assert not any(
        "no label" in target.figure for target in check_targets("fashion-mnist", without)
    )
    with_hog = [_seed(number, *records, _record("counts, hog", 1.0, 0.48)) for number in range(2)]
    (met_target,) = (
        target for target in check_targets("fashion-mnist", with_hog) if "no label" in target.figure
    )
    assert met_target.value == pytest.approx(0.96) and not met_target.met
