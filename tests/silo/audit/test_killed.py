"""kill -9 of a worker during the audit: it goes on behind the last part, and finds the same to the bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from silo.audit import measuring
from silo.audit.document import AuditReport, read_report
from silo.plan.workspace import open_workspace
from silo.worker import auditing
from silo.worker.state import load_state, state_path
from silo.worker.worker import Worker
from tests.support.case import case
from tests.support.federation import POLICY, TinyFederation, recipe, write_policy
from tests.support.forked import fork_process, wait_for_exit

SILO = "north"
MOST = {"max_near_copy_rate": 1.0, "max_mia_auc": 1.0, "max_mia_tpr": 1.0}
LOOSE = {"required": True, "min_holdout_units": 10} | MOST
HOLDS = {"required": True, "holdout_share": 0.25, "min_holdout_units": 10, "num_samples": 40} | MOST


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(place: int | str, progress_calls: list[int] | None = None) -> None:
    """Let this process be killed once the audit has told its progress so often, or behind a call."""
    if isinstance(place, str):
        module: Any = measuring if hasattr(measuring, place) else auditing
        whole: Callable[..., object] = getattr(module, place)
        setattr(module, place, lambda *arguments: (whole(*arguments), kill()))
        return
    counting = Worker.count_images
    calls = progress_calls if progress_calls is not None else []

    def count(self: Worker, stage: Any) -> Callable[[int, int], None]:
        tell = counting(self, stage)

        def then(num_done: int, total: int) -> None:
            tell(num_done, total)
            if stage == "auditing":
                calls.append(num_done)
                if len(calls) == place:
                    kill()

        return then

    Worker.count_images = count  # type: ignore[method-assign]


def audit_results(tiny: TinyFederation, plan_id: str) -> dict[str, bytes]:
    """What an audit leaves behind: its report but for the random number in it, and the worst pairs."""
    work = open_workspace(tiny.sites[SILO], plan_id)
    report: AuditReport = read_report(work.audit_path).model_copy(update={"salt": "0" * 64})
    return {"report": report.encode()} | {
        path.name: path.read_bytes() for path in work.audit_folder(SILO).iterdir()
    }


def test_worker_killed_wherever_in_the_audit_finds_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 80})
    plan_id = tiny.sign(recipe(audit=LOOSE))
    tiny.deliver_plan(SILO, plan_id)
    write_policy(
        tiny.sites[SILO],
        POLICY | {"audit": HOLDS | {"waiver": tiny.sites[SILO].policy().audit.waiver}},
    )
    tiny.work(SILO, until="auditing")
    killed = tiny.copy(tmp_path / "killed")
    progress_calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "count_images", Worker.count_images)
        dies_at(-1, progress_calls)
        tiny.work(SILO, until="audited")
    undisturbed = audit_results(tiny, plan_id)
    num = len(progress_calls)
    site = killed.sites[SILO]
    parts = set()

    def work(place: int | str) -> None:
        dies_at(place)
        killed.work(SILO, until="audited")

    for place in (
        num // 8,
        num // 4,
        num // 3,
        "_measure_neighbours",
        "write_worst",
        "discard_measurements",
    ):
        with case(place):
            assert wait_for_exit(fork_process(lambda place=place: work(place))) == -signal.SIGKILL  # type: ignore[misc]
            assert load_state(state_path(site.private)).state == "auditing"
            folder = open_workspace(site, plan_id)
            assert not folder.audit_path.exists() and not list(site.outbox.glob(f"{plan_id}/*"))
            parts.add(
                frozenset(path.stem for path in folder.audit_folder(SILO).rglob("*.safetensors"))
            )
    assert len(parts) >= 5, "killed at places where other parts were done"
    killed.work(SILO, until="audited")
    assert audit_results(killed, plan_id) == undisturbed
