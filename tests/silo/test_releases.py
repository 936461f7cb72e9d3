import json
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import silo.releases
from ddm.errors import BudgetError, DataError, LedgerError, PolicyError
from ddm.privacy import OS_NOISE, gaussian_mu, t_release
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Budget, Plan
from ddm.routers.counts import counts_specs
from ddm.schedule import LinearPath
from ddm.sketch import Sketch, sketch_release_specs
from ddm.tensors import load_tensors
from silo.ledger import Debit, Ledger
from silo.releases import draw_counts, draw_sketches
from tests.silo.workers import CONTEXT

GROUPS, RANK, UNITS = 4, 3, 2000
DATA = sha256_hex(b"data 1")


def make_plan(counts: float = 1.0, sketch: float = 7.0) -> Plan:
    files = [f"plan/{name}.safetensors" for name in ("centroids", "encoder", "sketch")]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    architecture = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
    training = {"num_steps": 1, "batch_size": 4, "learning_rate": 0.1, "weight_decay": 0.0, "ema_decay": 0.0}
    return Plan.model_validate_json(
        json.dumps(
            {
                "plan_id": "digits-0000abcd",
                "created_at": now.isoformat(),
                "expires_at": (now + timedelta(days=1)).isoformat(),
                "silos": ["north"],
                "receipt_key": "ed25519:" + "0" * 64,
                "files": [{"path": path, "bytes": 1, "digest": "0" * 64} for path in files],
                "data": {"shape": [1, 4, 4], "range": [-1.0, 1.0]},
                "latent": {},
                "encoder": {"dim": 4},
                "clustering": {"num_fine": GROUPS, "num_coarse": 1},
                "partition": {"min_images": 1},
                "objective": {},
                "t_distribution": {"kind": "uniform"},
                "condition": {},
                "expert": {"architecture": architecture, "training": {**training, "checkpoint_steps": 1}},
                "releases": {
                    "unit": "image",
                    "total": {"epsilon": counts + sketch, "delta": 1e-5},
                    "counts": {"epsilon": counts, "num_groups": GROUPS},
                    "sketch": {"epsilon": sketch, "delta": 1e-5, "rank": RANK},
                },
                "router": {"kind": "counts"},
                "audit": {
                    "required": False,
                    "min_holdout_units": 1,
                    "max_near_copy_rate": 1.0,
                    "max_mia_auc": 1.0,
                },
                "limits": {"expert_bytes": 1, "release_bytes": 1_000_000, "train_s": 1, "gpu_hours": 1.0},
            }
        )
    )


def make_images(num: int = UNITS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(num) % GROUPS
    centre = torch.randn(GROUPS, 16, generator=generator)
    return (centre[group] + 0.3 * torch.randn(num, 16, generator=generator)).view(num, 1, 4, 4), group


def open_ledger(folder: Path, epsilon: float = 10.0) -> Ledger:
    return Ledger(folder / "private" / "ledger.jsonl", budget=Budget(epsilon=epsilon, delta=1e-5), unit="image")


PLAN = make_plan()
PLAN_DIGEST = PLAN.digest
SKETCH = Sketch.fit(*make_images(400), RANK, GROUPS)


class Forbidden:
    """A noise source that proves that nobody drew from it."""

    def below(self, bound: int) -> int:
        raise AssertionError("noise was drawn")

    def octets(self, num: int) -> bytes:
        raise AssertionError("noise was drawn")


def counts_of(ledger: Ledger, folder: Path, group=None, data: str = DATA, plan: Plan = PLAN, **kwargs) -> torch.Tensor:
    group = make_images()[1] if group is None else group
    path = draw_counts(ledger, plan, plan.digest, group, data, folder, **kwargs)
    return load_tensors(path, counts_specs(plan), max_bytes=10_000)["counts"]


def sketches_of(ledger: Ledger, folder: Path, images=None, data: str = DATA, plan: Plan = PLAN, **kwargs):
    images = make_images()[0] if images is None else images
    path = draw_sketches(ledger, plan, plan.digest, SKETCH, images, data, folder, **kwargs)
    return load_tensors(path, sketch_release_specs(plan, len(images)), max_bytes=1_000_000)["sketch"]


def debits(ledger: Ledger) -> list[dict]:
    lines = [json.loads(line) for line in ledger.path.read_bytes().splitlines()]
    return [line for line in lines if line["record"] == "debit"]


def test_counts_are_the_histogram_plus_noise_of_their_epsilon(tmp_path: Path) -> None:
    exact = counts_of(open_ledger(tmp_path / "exact", 1000.0), tmp_path, plan=make_plan(counts=300.0))
    assert exact.tolist() == [UNITS // GROUPS] * GROUPS
    noisy = counts_of(open_ledger(tmp_path / "noisy"), tmp_path)
    assert 0 < int((noisy - exact).abs().max()) < 60  # P(|z| >= 60) is e^-30, P(all four are 0) under one in 200
    assert noisy.dtype == torch.int64


def test_sketches_are_a_shuffle_of_their_units_plus_noise_of_their_level(tmp_path: Path) -> None:
    images = make_images()[0]
    found = sketches_of(open_ledger(tmp_path), tmp_path).double()
    t_r = t_release(gaussian_mu(7.0, 1e-5), SKETCH.scale, LinearPath(), RANK)
    clean, std = (1 - t_r) * SKETCH.project(images), t_r / SKETCH.scale
    total = (clean.T.cov(correction=0) + std**2 * torch.eye(RANK)).diagonal()
    inverse_cdf = chi2.isf([1 - 1e-7, 1e-7], UNITS - 1) / UNITS
    ratio = found.var(0, correction=0) / total
    assert float(ratio.min()) > inverse_cdf[0] and float(ratio.max()) < inverse_cdf[1]
    assert float((found.mean(0) - clean.mean(0)).abs().max()) < 5.5 * float(total.max()) ** 0.5 / UNITS**0.5
    quartered = (clean.T.cov(correction=0) + (std / 4) ** 2 * torch.eye(RANK)).diagonal() / total
    assert float(quartered.max()) < inverse_cdf[0]  # noise a quarter as large would have been caught


def test_sketches_come_in_an_order_that_tells_nothing(tmp_path: Path) -> None:
    plan = make_plan(sketch=900.0)  # so little noise that each row can be matched to its image
    images = make_images(300)[0]
    found = sketches_of(open_ledger(tmp_path, 1000.0), tmp_path, images=images, plan=plan).double()
    order = torch.cdist(found / found.norm(), SKETCH.project(images) / SKETCH.project(images).norm()).argmin(1)
    correlation = np.corrcoef(order.numpy(), np.arange(300))[0, 1]
    assert len(order.unique()) > 150
    assert abs(correlation) < 5.5 / 300**0.5


def test_released_sketches_lie_on_the_public_grid_so_that_low_bits_betray_nothing(tmp_path: Path) -> None:
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
    with pytest.raises(AssertionError, match="noise was drawn"):  # within budget the same source does raise
        counts_of(open_ledger(tmp_path / "rich"), tmp_path, noise=Forbidden())


def test_release_is_drawn_once_when_the_worker_asks_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    first = counts_of(ledger, tmp_path / "a"), sketches_of(ledger, tmp_path / "a")
    again = counts_of(ledger, tmp_path / "b", noise=Forbidden()), sketches_of(ledger, tmp_path / "b", noise=Forbidden())
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert [debit["kind"] for debit in debits(ledger)] == ["counts", "sketch"]
    assert ledger.head[1] == 4
    assert ledger.spent()[0] < 8.0


def test_dataset_changed_by_one_image_costs_again_and_is_drawn_afresh(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    counts_of(ledger, tmp_path)
    counts_of(ledger, tmp_path, data=sha256_hex(b"data 2"))
    assert len(debits(ledger)) == 2
    assert ledger.spent()[0] == pytest.approx(2.0, rel=1e-3)


def test_lost_or_changed_draw_is_refused_rather_than_drawn_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    counts_of(ledger, tmp_path)
    (kept,) = ledger.draws.glob("*.safetensors")
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    with pytest.raises(LedgerError, match="another file"):
        counts_of(ledger, tmp_path, noise=Forbidden())
    kept.unlink()
    with pytest.raises(LedgerError, match="none"):
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
        images = make_images()[0]
        bad = replace(SKETCH, basis_RD=SKETCH.basis_RD * 3)
        draw_sketches(ledger, PLAN, PLAN_DIGEST, bad, images, DATA, tmp_path, noise=Forbidden())
    assert not ledger.path.exists()


def test_group_outside_the_plan_is_refused_before_anything_is_debited(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    with pytest.raises(DataError):
        counts_of(ledger, tmp_path, group=torch.tensor([0, GROUPS]), noise=Forbidden())
    assert not ledger.path.exists()


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
        silo.releases.write_atomic = hold  # type: ignore[assignment]
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
def test_worker_killed_after_its_draw_was_written_never_draws_again(tmp_path: Path, stage: str) -> None:
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
    found = debits(ledger)
    assert found[0]["mechanism"] == {"kind": "discrete_laplace", "epsilon": 1}
    assert found[1]["mechanism"]["mu"] == pytest.approx(gaussian_mu(7.0, 1e-5))
    assert {debit["dataset_digest"] for debit in found} == {DATA}
    assert {debit["plan_digest"] for debit in found} == {PLAN_DIGEST}
    assert Debit.model_fields["relation"].default == "replace_one"
    assert OS_NOISE.below(1) == 0
