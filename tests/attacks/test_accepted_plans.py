"""An attack by a plan that a site may take: what it learns is bounded by what its releases were debited."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.errors import ArchipelagoError, BudgetError, DigestError
from ddm.io.tensors import load_tensors
from ddm.protocol.statistics import Budget
from ddm.statistics.base import StatisticSource
from examples.paper.privacy import neighbours
from examples.paper.privacy.attacks import epsilon_bound
from examples.paper.privacy.drawing import Released, release
from silo.plan.acceptance import AcceptedPlan, load_accepted, waiting_plans
from silo.privacy.ledger import Ledger, make_ledger
from silo.privacy.statistics import draw_statistic
from tests.support.dishonest_aggregator import (
    DELTA,
    PUBLIC,
    DishonestAggregator,
    UnsignedPlan,
    clusters_around,
    random_images,
)
from tests.support.errors import has_subject

PATIENTS = 512  # each singled out by a centroid of its own
PRIVATE = random_images(PATIENTS, 1)
DECOYS = random_images(PATIENTS, 2)


def singling_out(counts_epsilon: float, moved: float = 0.0) -> UnsignedPlan:
    """Centroids exactly on private images and on those that they may have been exchanged for; `moved` shifts one."""
    clusters = clusters_around(torch.stack([PRIVATE, DECOYS], 1).flatten(0, 1))
    clusters.centroids_FD[1] += moved
    return UnsignedPlan.honest(
        clusters, counts={"epsilon": counts_epsilon, "num_groups": 2 * PATIENTS}, sketch=None
    )


def source_of(accepted: AcceptedPlan, images: Tensor) -> StatisticSource:
    """What the worker makes releases from."""
    files = accepted.files()
    return StatisticSource(
        plan=accepted.plan,
        plan_digest=accepted.digest,
        sketch=files.sketch,
        images=images,
        group_N=files.clusters.groups(files.encoder.encode(images)),
        unit_N=torch.arange(len(images)),
        label_N=None,
        dataset_digest="0" * 64,
    )


def worlds_of(accepted: AcceptedPlan) -> tuple[StatisticSource, StatisticSource]:
    return source_of(accepted, PRIVATE), source_of(accepted, DECOYS)


def told_apart(accepted: AcceptedPlan, num: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the attack on the two cells in which a patient may stand alone."""
    epsilon = accepted.plan.statistics.counts.epsilon

    def score(released: Released) -> np.ndarray:
        return neighbours.moved_score(released["counts"]["counts"], 1, epsilon)

    return neighbours.Neighbours(("counts",), worlds_of(accepted), score).scores(num)


def ledger_at(folder: Path, epsilon: float) -> Ledger:
    folder.mkdir(parents=True, exist_ok=True)
    make_ledger(folder / "ledger.jsonl")
    return Ledger(
        folder / "ledger.jsonl", budget=Budget(epsilon=epsilon, delta=DELTA), unit="image"
    )


def test_group_that_holds_one_patient_tells_no_more_than_epsilon_of_the_patient(
    aggregator: DishonestAggregator,
) -> None:
    accepted = aggregator.offer(singling_out(1.0))
    first, second = worlds_of(accepted)
    assert torch.equal(
        torch.bincount(first.group_N, minlength=2 * PATIENTS)[0::2], torch.ones(PATIENTS).long()
    )
    assert torch.equal(
        torch.bincount(second.group_N, minlength=2 * PATIENTS)[1::2], torch.ones(PATIENTS).long()
    )
    assert epsilon_bound(*told_apart(accepted), 0.0) <= 1.0
    # a quarter of the noise
    assert epsilon_bound(*told_apart(aggregator.offer(singling_out(4.0))), 0.0) > 1.0


def test_plans_that_differ_in_one_centroid_are_both_debited_and_bounded_together(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    plans = [aggregator.offer(singling_out(1.0)), aggregator.offer(singling_out(1.0, moved=0.01))]
    assert plans[0].digest != plans[1].digest
    ledger = ledger_at(tmp_path, 10.0)
    for accepted in plans:
        draw_statistic("counts", source_of(accepted, PRIVATE), ledger, tmp_path)
    claim, _ = ledger.spent()
    assert claim == pytest.approx(2.0)
    first, second = (
        sum(scores)
        for scores in zip(*(told_apart(accepted, 6144) for accepted in plans), strict=True)
    )
    assert 1.0 < epsilon_bound(first, second, 0.0) <= claim


def test_second_of_two_plans_that_differ_in_one_centroid_is_refused_over_budget(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    plans = [aggregator.offer(singling_out(1.0)), aggregator.offer(singling_out(1.0, moved=0.01))]
    ledger = ledger_at(tmp_path, 1.5)
    draw_statistic("counts", source_of(plans[0], PRIVATE), ledger, tmp_path)
    (tmp_path / "counts.safetensors").unlink()
    with pytest.raises(BudgetError) as refusal:
        draw_statistic("counts", source_of(plans[1], PRIVATE), ledger, tmp_path)
    assert all(
        word in str(refusal.value)
        for word in ("privacy ledger", "at most 1.5", "got 2 with this plan")
    )
    assert not (tmp_path / "counts.safetensors").exists()
    assert ledger.spent()[0] == 1.0


def drawn_until_refused(
    world: StatisticSource, ledger: Ledger, folder: Path, num_plans: int
) -> list[Tensor]:
    """The histograms that as many plans get; they differ in their digests."""
    released = []
    for number in range(num_plans):
        try:
            path = draw_statistic(
                "counts", replace(world, plan_digest=f"{number:064x}"), ledger, folder
            )
        except BudgetError:
            continue
        released.append(load_tensors(path, None, max_bytes=1 << 20)["counts"])
    return released


def test_hundred_plans_get_no_more_than_the_budget_between_them(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    epsilon = 1.0
    budget = 2.0
    worlds = worlds_of(aggregator.offer(singling_out(epsilon)))

    def bound(draws_by_world: list[list[Tensor]]) -> float:
        first, second = (
            np.asarray(sum(neighbours.moved_score(draw, 1, epsilon) for draw in draws))
            for draws in draws_by_world
        )
        return epsilon_bound(first, second, 0.0)

    ledgers = [ledger_at(tmp_path / name, budget) for name in ("first", "second")]
    counted = [
        drawn_until_refused(world, ledger, ledger.path.parent, 100)
        for world, ledger in zip(worlds, ledgers, strict=True)
    ]
    assert [len(draws) for draws in counted] == [2, 2]
    assert [ledger.spent()[0] for ledger in ledgers] == [budget, budget]
    assert bound(counted) <= budget
    uncounted = [
        [release(world, ("counts",))["counts"]["counts"] for _ in range(32)] for world in worlds
    ]
    assert bound(uncounted) > budget


def test_plan_under_the_id_of_an_accepted_one_is_not_looked_at_and_would_pay_again(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    first = aggregator.offer(singling_out(1.0), plan_id="digits-aaaaaaaa")
    aggregator.site.work_folder(first.plan.plan_id).mkdir(parents=True)
    other = singling_out(1.0, moved=0.01)
    aggregator.deliver(other, plan_id=first.plan.plan_id)
    assert first.plan.plan_id not in waiting_plans(aggregator.site)
    assert load_accepted(aggregator.site, first.plan.plan_id, first.digest).digest == first.digest
    second = aggregator.receive(first.plan.plan_id)  # were it taken all the same
    with pytest.raises(DigestError, check=has_subject("plan.json")):
        load_accepted(aggregator.site, first.plan.plan_id, first.digest)
    ledger = ledger_at(tmp_path, 1.5)
    draw_statistic("counts", source_of(second, PRIVATE), ledger, tmp_path)
    with pytest.raises(BudgetError):
        draw_statistic(
            "counts",
            replace(source_of(second, PRIVATE), plan_digest=first.digest),
            ledger,
            tmp_path,
        )


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_membership_attack_on_sketches_is_bounded_at_any_scale_that_is_allowed(
    scale: float,
) -> None:
    claim = 1.0
    delta = 1e-2
    assert (
        epsilon_bound(*neighbours.sketches(claim, delta, scale=scale).scores(20_000), delta)
        <= claim
    )
    quarter = neighbours.with_quarter_noise(claim, delta)
    assert (
        epsilon_bound(*neighbours.sketches(quarter, delta, scale=scale).scores(20_000), delta)
        > claim
    )


def test_scale_so_large_that_sketches_are_noise_alone_is_refused_before_anything_is_debited(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    vast = UnsignedPlan.honest(clusters_around(PUBLIC[:8]))
    vast.tensors["sketch"]["scale"] = torch.tensor([1e6])
    ledger = ledger_at(tmp_path, 10.0)
    with pytest.raises(ArchipelagoError, check=has_subject("plan digits-")):
        draw_statistic("sketch", source_of(aggregator.offer(vast), PRIVATE), ledger, tmp_path)
    assert ledger.path.read_bytes() == b""
