import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import silo.privacy.statistics
from ddm.diffusion.path import LinearPath
from ddm.errors import BudgetError, DataError, LedgerError, NumericalError, PolicyError
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.privacy.accounting import gaussian_mu, t_release
from ddm.privacy.noise import OS_NOISE, Noise
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import Budget, StatisticKind
from ddm.routers.sketch import Sketch
from ddm.statistics.base import Draw, StatisticSource
from ddm.statistics.of_plan import statistics_of
from silo.privacy.ledger import Debit, Ledger, make_ledger
from silo.privacy.statistics import draw_statistic
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.fork_server import CONTEXT
from tests.support.seeded import SeededNoise

GROUPS = 4
CLASSES = 5
WIDE = 5
RANK = 3
UNITS = 2000
DATA = sha256_hex(b"data 1")


def make_plan(counts: float = 1.0, sketch: float | None = 7.0, **changes: object) -> Plan:
    """A plan for 4 x 4 images; statistics other than counts and sketches by keyword, as in the document."""
    statistics = {
        "unit": "image",
        "total": {"epsilon": 1000.0, "delta": 1e-5},
        "counts": {"epsilon": counts, "num_groups": GROUPS},
        "sketch": sketch and {"epsilon": sketch, "delta": 1e-5, "rank": RANK},
    }
    document = plan_document(
        created_at="2026-01-01T00:00:00Z",
        expires_at="2027-01-01T00:00:00Z",  # the same plan in every process
        data={"shape": [1, 4, 4], "range": [-1.0, 1.0]},
        clustering={"num_fine": GROUPS, "num_coarse": 1},
        sketch={"rank": WIDE},
        router={"kind": "counts"},
        statistics=statistics | changes,
    )
    return Plan.parse(to_bytes(document), subject="plan.json")


def make_images(num: int = UNITS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(num) % GROUPS
    centre = torch.randn(GROUPS, 16, generator=generator)
    return (centre[group] + 0.3 * torch.randn(num, 16, generator=generator)).view(
        num, 1, 4, 4
    ), group


def open_ledger(folder: Path, epsilon: float = 10.0) -> Ledger:
    (folder / "private").mkdir(parents=True, exist_ok=True)
    make_ledger(folder / "private" / "ledger.jsonl")
    return Ledger(
        folder / "private" / "ledger.jsonl",
        budget=Budget(epsilon=epsilon, delta=1e-5),
        unit="image",
    )


PLAN = make_plan()
PLAN_DIGEST = PLAN.digest
SKETCH = Sketch.fit(*make_images(400), WIDE, GROUPS)
HEAD = SKETCH.head(RANK)


def make_source(plan: Plan = PLAN, **changes: object) -> StatisticSource:
    """Every image a unit of its own, classes dealt in turn."""
    images, group = make_images()
    source = StatisticSource(
        plan=plan,
        plan_digest=plan.digest,
        sketch=SKETCH,
        images=images,
        group_N=group,
        unit_N=torch.arange(len(images)),
        label_N=torch.arange(len(images)) % CLASSES,
        dataset_digest=DATA,
    )
    return replace(source, **changes)  # type: ignore[arg-type]


class Forbidden:
    """A noise source that proves that nobody drew from it."""

    def below(self, bound: int) -> int:
        raise AssertionError("noise was drawn")

    def octets(self, num: int) -> bytes:
        raise AssertionError("noise was drawn")


def counts_of(
    ledger: Ledger, folder: Path, data: str = DATA, noise: Noise = OS_NOISE, **kwargs
) -> torch.Tensor:
    source = make_source(dataset_digest=data, **kwargs)
    path = draw_statistic("counts", source, ledger, folder, noise=noise)
    return load_tensors(path, specs_of("counts", source), max_bytes=10_000)["counts"]


def sketches_of(ledger: Ledger, folder: Path, noise: Noise = OS_NOISE, **kwargs) -> torch.Tensor:
    source = make_source(**kwargs)
    path = draw_statistic("sketch", source, ledger, folder, noise=noise)
    return load_tensors(path, specs_of("sketch", source), max_bytes=1_000_000)["sketch"]


def specs_of(kind: StatisticKind, source: StatisticSource) -> dict[str, TensorSpec]:
    """The tensors that this statistic of a source must have."""
    num_units = int(source.unit_N.max()) + 1
    return statistics_of(source.plan.statistics)[kind].tensor_specs(num_units)


def debits(ledger: Ledger) -> list[dict]:
    lines = [json.loads(line) for line in ledger.path.read_bytes().splitlines()]
    return [line for line in lines if line["record"] == "debit"]


def test_counts_are_the_histogram_plus_noise_of_their_epsilon(tmp_path: Path) -> None:
    exact = counts_of(
        open_ledger(tmp_path / "exact", 1000.0), tmp_path / "exact", plan=make_plan(counts=300.0)
    )
    assert exact.tolist() == [UNITS // GROUPS] * GROUPS
    noisy = counts_of(open_ledger(tmp_path / "noisy"), tmp_path / "noisy", noise=SeededNoise(0))
    assert 0 < int((noisy - exact).abs().max()) < 20  # a draw is beyond with a probability of e^-10
    assert noisy.dtype == torch.int64


def test_sketches_are_a_shuffle_of_their_units_plus_noise_of_their_level(tmp_path: Path) -> None:
    images = make_images()[0]
    noised = sketches_of(open_ledger(tmp_path), tmp_path).double()
    t_r = t_release(gaussian_mu(7.0, 1e-5), SKETCH.scale, LinearPath(), RANK)
    clean = (1 - t_r) * HEAD.project(images)
    std = t_r / SKETCH.scale
    total = (clean.T.cov(correction=0) + std**2 * torch.eye(RANK)).diagonal()
    inverse_cdf = chi2.isf([1 - 1e-7, 1e-7], UNITS - 1) / UNITS
    ratio = noised.var(0, correction=0) / total
    assert float(ratio.min()) > inverse_cdf[0] and float(ratio.max()) < inverse_cdf[1]
    assert (
        float((noised.mean(0) - clean.mean(0)).abs().max())
        < 5.5 * float(total.max()) ** 0.5 / UNITS**0.5
    )
    quartered = (clean.T.cov(correction=0) + (std / 4) ** 2 * torch.eye(RANK)).diagonal() / total
    # noise a quarter as large would have been caught
    assert float(quartered.max()) < inverse_cdf[0]


def test_sketches_come_in_an_order_that_tells_nothing(tmp_path: Path) -> None:
    plan = make_plan(sketch=900.0)  # so little noise that each row can be matched to its image
    images = make_images(300)[0]
    source = {"images": images, "group_N": torch.arange(300) % GROUPS, "unit_N": torch.arange(300)}
    noised = sketches_of(open_ledger(tmp_path, 1000.0), tmp_path, plan=plan, **source).double()
    clean = HEAD.project(images)
    order = torch.cdist(noised / noised.norm(), clean / clean.norm()).argmin(1)
    correlation = np.corrcoef(order.numpy(), np.arange(300))[0, 1]
    assert len(order.unique()) > 150
    assert abs(correlation) < 5.5 / 300**0.5


def test_released_sketches_lie_on_the_public_grid_so_that_low_bits_betray_nothing(
    tmp_path: Path,
) -> None:
    t_r = t_release(gaussian_mu(7.0, 1e-5), SKETCH.scale, LinearPath(), RANK)
    steps = sketches_of(open_ledger(tmp_path), tmp_path).double() / (1 - t_r) * 2**16
    assert float((steps - steps.round()).abs().max()) < 0.05  # what float32 leaves


def test_over_budget_release_is_refused_before_any_noise_is_drawn(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, epsilon=0.9)
    with pytest.raises(BudgetError):
        counts_of(ledger, tmp_path, noise=Forbidden())
    with pytest.raises(BudgetError):
        sketches_of(ledger, tmp_path, noise=Forbidden())
    assert debits(ledger) == []
    assert list(tmp_path.glob("*.safetensors")) == []
    # within budget the same source does raise
    with pytest.raises(AssertionError, match="noise was drawn"):
        counts_of(open_ledger(tmp_path / "rich"), tmp_path, noise=Forbidden())


def test_release_is_drawn_once_when_the_worker_asks_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    first = counts_of(ledger, tmp_path / "a"), sketches_of(ledger, tmp_path / "a")
    again = (
        counts_of(ledger, tmp_path / "b", noise=Forbidden()),
        sketches_of(ledger, tmp_path / "b", noise=Forbidden()),
    )
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert [set(debit["mechanisms"]) for debit in debits(ledger)] == [{"counts", "sketch"}]
    assert ledger.head[1] == 3
    assert ledger.spent()[0] < 8.0


def test_dataset_changed_by_one_image_costs_again_and_is_drawn_afresh(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    plan = make_plan(sketch=None)
    first = counts_of(ledger, tmp_path, plan=plan)
    others = [
        counts_of(ledger, tmp_path, plan=plan, data=sha256_hex(b"data %d" % number))
        for number in (2, 3, 4)
    ]
    assert any(not torch.equal(first, other) for other in others)
    assert len(debits(ledger)) == 4
    assert ledger.spent()[0] == 4.0


def test_lost_or_changed_draw_is_refused_rather_than_drawn_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    counts_of(ledger, tmp_path)
    (kept,) = ledger.draws.glob("*.safetensors")
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    with pytest.raises(LedgerError, match="another digest"):
        counts_of(ledger, tmp_path, noise=Forbidden())
    kept.unlink()
    with pytest.raises(LedgerError, match="no file"):
        counts_of(ledger, tmp_path, noise=Forbidden())


def test_damaged_ledger_stops_a_release_before_any_noise_is_drawn(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    counts_of(ledger, tmp_path)
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b'"epsilon":1', b'"epsilon":0.1'))
    with pytest.raises(LedgerError):
        sketches_of(ledger, tmp_path, noise=Forbidden())


def test_malicious_sketch_is_refused_before_anything_is_debited(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    with pytest.raises(PolicyError):
        bad = replace(SKETCH, basis_RD=SKETCH.basis_RD * 3)
        sketches_of(ledger, tmp_path, sketch=bad, noise=Forbidden())
    assert ledger.path.read_bytes() == b""


@pytest.mark.parametrize(
    "spoiled",
    [
        {"group_N": torch.full((UNITS,), GROUPS)},
        {"group_N": torch.full((UNITS,), -1)},
        {"group_N": torch.zeros(UNITS - 1, dtype=torch.int64)},
        {"label_N": torch.full((UNITS,), CLASSES)},
        {"label_N": None},
        {"unit_N": torch.arange(UNITS) // 2},
        {"unit_N": torch.arange(UNITS - 1)},
        {"unit_N": torch.arange(UNITS) + 1},
    ],
    ids=[
        "group",
        "negative group",
        "groups",
        "class",
        "no classes",
        "image twice a unit",
        "units",
        "gap in units",
    ],
)
def test_indices_outside_the_plan_are_refused_before_anything_is_debited(
    tmp_path: Path, spoiled
) -> None:
    ledger = open_ledger(tmp_path)
    plan = make_plan(class_counts={"epsilon": 1.0, "num_classes": CLASSES})
    with pytest.raises(DataError):
        draw_statistic(
            "class_counts", make_source(plan, **spoiled), ledger, tmp_path, noise=Forbidden()
        )
    assert ledger.path.read_bytes() == b""


def test_release_that_the_plan_does_not_ask_for_is_refused_before_anything_is_debited(
    tmp_path: Path,
) -> None:
    ledger = open_ledger(tmp_path)
    with pytest.raises(PolicyError, check=has_subject("plan digits-3f9a1c2e")):
        draw_statistic("class_counts", make_source(), ledger, tmp_path, noise=Forbidden())
    assert ledger.path.read_bytes() == b""


def test_sketches_that_would_be_noise_alone_are_refused_before_anything_is_debited(
    tmp_path: Path,
) -> None:
    ledger = open_ledger(tmp_path)
    plan = make_plan(sketch=1e-5)
    faint = replace(SKETCH, scale=1e4)
    with pytest.raises(NumericalError, check=has_subject("t_release")):
        sketches_of(ledger, tmp_path, plan=plan, sketch=faint, noise=Forbidden())
    assert ledger.path.read_bytes() == b""


def drawn(
    kind: StatisticKind,
    source: StatisticSource,
    noise: Noise = OS_NOISE,
    chosen: np.ndarray | None = None,
):
    """What a release draws from these records, without a ledger."""
    chosen = np.arange(len(source.images)) if chosen is None else chosen
    return prepared(kind, source)(chosen, noise)


def prepared(kind: StatisticKind, source: StatisticSource) -> Draw:
    return statistics_of(source.plan.statistics)[kind].prepare(source)


def test_class_counts_are_the_histogram_by_class_and_group(tmp_path: Path) -> None:
    quiet = make_plan(sketch=None, class_counts={"epsilon": 900.0, "num_classes": CLASSES})
    path = draw_statistic(
        "class_counts", make_source(quiet), open_ledger(tmp_path, 1000.0), tmp_path
    )
    assert path.name == "class_counts.safetensors"
    exact = load_tensors(path, None, max_bytes=10_000)["counts"]
    assert (exact.dtype, exact.shape) == (torch.int64, (CLASSES, GROUPS))
    assert torch.equal(exact, torch.full((CLASSES, GROUPS), UNITS // CLASSES // GROUPS))
    skewed = make_source(quiet, label_N=torch.zeros(UNITS, dtype=torch.int64))
    # rows are classes, columns groups
    assert drawn("class_counts", skewed)["counts"].sum(1).argmax() == 0


@pytest.mark.parametrize(("kind", "num"), [("counts", 800), ("class_counts", 160)])
def test_noise_of_histograms_has_the_variance_of_their_epsilon(
    kind: StatisticKind, num: int
) -> None:
    terms = {"epsilon": 0.5, "num_classes": CLASSES}
    source = make_source(make_plan(counts=0.5, sketch=None, class_counts=terms))
    exact = UNITS // GROUPS if kind == "counts" else UNITS // GROUPS // CLASSES
    draw = prepared(kind, source)
    noise = torch.stack(
        [draw(np.arange(UNITS), OS_NOISE)["counts"] - exact for _ in range(num)]
    ).double()
    q = math.exp(-0.5 / 2)
    variance = 2 * q / (1 - q) ** 2
    # the law's kurtosis is just above 6; squares have a heavier tail
    off = 6.0 * (5.1 / noise.numel()) ** 0.5
    # half or twice as much would be caught
    assert abs(float(noise.square().mean()) / variance - 1) < off < 0.3
    assert abs(float(noise.mean())) < 5.5 * (variance / noise.numel()) ** 0.5


def by_patient(unit_N: torch.Tensor, **kwargs) -> StatisticSource:
    """Statistics by patient with next to no noise."""
    quiet = make_plan(
        unit="patient",
        counts=200.0,
        sketch=None,
        class_counts={"epsilon": 200.0, "num_classes": CLASSES},
    )
    num = len(unit_N)
    images, group = make_images(num)
    return make_source(
        quiet, **{"images": images, "group_N": group, "label_N": group, "unit_N": unit_N} | kwargs
    )


def test_every_release_looks_at_one_uniform_record_of_each_patient(tmp_path: Path) -> None:
    num_patients = 1000
    shuffled = torch.randperm(8 * num_patients, generator=torch.Generator().manual_seed(0))
    unit = torch.arange(num_patients).repeat(8)[shuffled]
    # the how-manieth record of its patient
    place = torch.argsort(torch.argsort(unit, stable=True)) % 8
    group = (place >= 6).long()  # each patient: six records in group 0, two in group 1
    source = by_patient(unit, group_N=group, label_N=place.clamp(max=CLASSES - 1))
    ledger = open_ledger(tmp_path, 1000.0)
    counts = load_tensors(
        draw_statistic("counts", source, ledger, tmp_path), None, max_bytes=10_000
    )["counts"]
    assert counts.sum() == num_patients
    assert abs(int(counts[1]) - num_patients / 4) < 5.5 * (num_patients * 3 / 16) ** 0.5
    classes = load_tensors(
        draw_statistic("class_counts", source, ledger, tmp_path), None, max_bytes=10_000
    )["counts"]
    assert classes.sum() == num_patients
    expected = num_patients * torch.tensor([1 / 8] * 4 + [1 / 2], dtype=torch.float64)
    statistic = float(((classes.sum(1) - expected).square() / expected).sum())
    assert statistic < chi2.isf(1e-7, CLASSES - 1)


def test_each_release_chooses_its_own_records(tmp_path: Path) -> None:
    source = by_patient(torch.arange(4000) // GROUPS)  # each patient has one record in each group
    # two choices have the same histogram once in 90,000 times
    ledger = open_ledger(tmp_path, 1000.0)
    noise = SeededNoise(0)
    counts, classes = (
        load_tensors(
            draw_statistic(kind, source, ledger, tmp_path, noise=noise), None, max_bytes=10_000
        )["counts"]
        for kind in ("counts", "class_counts")
    )
    assert counts.sum() == classes.sum() == 1000
    assert not torch.equal(counts, classes.sum(0))


def test_patient_with_five_hundred_images_moves_each_release_by_one_record(tmp_path: Path) -> None:
    unit = torch.cat([torch.arange(100), torch.full((500,), 100)])
    statistics: dict[int, dict[str, Any]] = {}
    for group in (1, 2):  # all that the patient has is exchanged
        source = by_patient(unit)
        its = source.unit_N == 100
        source.group_N[its] = source.label_N[its] = group
        source.images[its] = source.images[source.group_N == group][0]
        ledger = open_ledger(tmp_path / str(group), 1000.0)
        statistics[group] = {
            kind: load_tensors(
                draw_statistic(kind, source, ledger, tmp_path / str(group)), None, max_bytes=10_000
            )
            for kind in ("counts", "class_counts")
        }
        statistics[group]["all"] = torch.bincount(source.group_N, minlength=GROUPS)
    for kind in ("counts", "class_counts"):
        assert int((statistics[1][kind]["counts"] - statistics[2][kind]["counts"]).abs().sum()) == 2
    # without the draw: five hundred times as far
    assert int((statistics[1]["all"] - statistics[2]["all"]).abs().sum()) == 1000


class Whole:
    """Whole numbers from the operating system; bytes are refused."""

    def below(self, bound: int) -> int:
        return OS_NOISE.below(bound)

    def octets(self, num: int) -> bytes:
        raise AssertionError("records were drawn")


def test_releases_by_image_take_every_image_and_draw_none(tmp_path: Path) -> None:
    exact = counts_of(
        open_ledger(tmp_path, 1000.0), tmp_path, plan=make_plan(counts=300.0), noise=Whole()
    )
    assert exact.tolist() == [UNITS // GROUPS] * GROUPS
    # by patient the same source is asked
    with pytest.raises(AssertionError, match="records were drawn"):
        draw_statistic(
            "counts",
            by_patient(torch.arange(40)),
            open_ledger(tmp_path / "b", 1000.0),
            tmp_path / "b",
            noise=Whole(),
        )


class Reporting:
    """The operating system's noise, after saying that it was asked for."""

    def __init__(self, hold: Callable[[], None]) -> None:
        self.hold = hold

    def below(self, bound: int) -> int:
        self.hold()
        return OS_NOISE.below(bound)

    def octets(self, num: int) -> bytes:
        self.hold()
        return OS_NOISE.octets(num)


def _work_until(stage: str, folder: str, reached: Event) -> None:
    """Release counts, and at `stage` say so and wait to be killed."""

    def hold(*_: object) -> None:
        reached.set()
        signal.pause()

    ledger = open_ledger(Path(folder))
    if stage == "written":
        ledger.record_draw = hold  # type: ignore[method-assign,assignment]
    if stage == "recorded":
        silo.privacy.statistics.write_atomic = hold  # type: ignore[assignment,attr-defined]
    counts_of(ledger, Path(folder), noise=Reporting(hold) if stage == "debited" else OS_NOISE)


def _kill_at(stage: str, folder: Path) -> None:
    reached = CONTEXT.Event()
    process = CONTEXT.Process(target=_work_until, args=(stage, str(folder), reached))
    process.start()
    assert reached.wait(60)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_worker_killed_between_debit_and_draw_pays_once_and_draws_once(tmp_path: Path) -> None:
    _kill_at("debited", tmp_path)
    ledger = open_ledger(tmp_path)
    assert len(debits(ledger)) == 1 and not list(ledger.draws.iterdir())
    first = counts_of(ledger, tmp_path)
    assert len(debits(ledger)) == 1
    assert torch.equal(counts_of(ledger, tmp_path, noise=Forbidden()), first)


@pytest.mark.parametrize("stage", ["written", "recorded"])
def test_worker_killed_after_its_draw_was_written_never_draws_again(
    tmp_path: Path, stage: str
) -> None:
    _kill_at(stage, tmp_path)
    ledger = open_ledger(tmp_path)
    (kept,) = ledger.draws.glob("*.safetensors")
    before = kept.read_bytes()
    counts_of(ledger, tmp_path, noise=Forbidden())
    assert (tmp_path / "counts.safetensors").read_bytes() == before
    assert len(debits(ledger)) == 1


def test_ledger_names_what_was_drawn(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    counts_of(ledger, tmp_path)
    sketches_of(ledger, tmp_path)
    spent = debits(ledger)
    assert spent[0]["mechanisms"]["counts"] == {"kind": "discrete_laplace", "epsilon": 1}
    assert spent[0]["mechanisms"]["sketch"]["mu"] == pytest.approx(gaussian_mu(7.0, 1e-5))
    assert {debit["dataset_digest"] for debit in spent} == {DATA}
    assert {debit["plan_digest"] for debit in spent} == {PLAN_DIGEST}
    assert Debit.model_fields["relation"].default == "replace_one"
    assert OS_NOISE.below(1) == 0
