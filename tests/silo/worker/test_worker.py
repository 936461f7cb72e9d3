"""The worker, for real: refusals, approvals, kill -9 in training, and a world without a network."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from aggregator.membership.registry import record_ledger
from aggregator.planning.recipe import Recipe
from ddm.errors import ApprovalError, AuditError, BudgetError, DataError, SubmissionRefusedError
from ddm.protocol.receipt import RECEIPT_KIND, Receipt
from ddm.protocol.submission import submission_path
from ddm.publishing.keys import load_key
from ddm.system.processes import program
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey
from silo.config import Site
from silo.worker.approval import approve
from silo.worker.state import load_state, state_path
from silo.worker.withdrawal import withdraw_from_plan
from silo.worker.worker import Worker
from tests.support.errors import has_subject
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    PlannedFederation,
    TinyFederation,
    recipe,
    set_training,
    write_policy,
)
from tests.support.forked import fork_process, wait_for_exit
from tests.support.threads import THREADS
from tests.support.waiting import LIMIT_S, wait_until

SILO = "north"


@pytest.fixture
def planned(planned_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    return planned_once.copy(tmp_path / "copy")


def test_worker_refuses_a_plan_above_its_policy_before_touching_data(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    write_policy(tiny.sites[SILO], POLICY | {"privacy": {"max_epsilon": 3.0}})
    state = tiny.work(SILO, until="plan_refused")
    assert state.problem is not None
    assert state.problem.code == 31
    assert not (tiny.sites[SILO].private / "checkpoints").exists()
    assert tiny.sites[SILO].ledger_path.read_bytes() == b""


def test_worker_takes_a_refused_plan_after_the_policy_was_changed(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    write_policy(tiny.sites[SILO], POLICY | {"privacy": {"max_epsilon": 3.0}})
    tiny.work(SILO, until="plan_refused")
    write_policy(tiny.sites[SILO], POLICY)
    assert tiny.work(SILO, until="plan_accepted").problem is None


def test_worker_refuses_a_bundle_with_a_flipped_byte(planned: PlannedFederation) -> None:
    tiny, plan_id = planned
    path = (
        tiny.sites[SILO].inbox
        / plan_id
        / "bundle"
        / "targets"
        / plan_id
        / "plan"
        / "sketch.safetensors"
    )
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    state = tiny.work(SILO, until="plan_refused")
    assert state.problem is not None
    assert state.problem.code == 12
    assert "sketch.safetensors" in state.problem.message


def test_worker_refuses_a_plan_of_another_federation(
    planned: PlannedFederation, tmp_path: Path
) -> None:
    tiny, plan_id = planned
    stranger = TinyFederation.create(tmp_path / "stranger", {SILO: 20})
    strange_plan = stranger.sign()
    shutil.rmtree(tiny.sites[SILO].inbox / plan_id)
    shutil.copytree(
        stranger.federation.bundle(strange_plan), tiny.sites[SILO].inbox / strange_plan / "bundle"
    )
    state = tiny.work(SILO, until="plan_refused")
    assert state.problem is not None
    assert state.problem.code in {10, 11, 19}


def test_worker_refuses_over_budget_before_training_and_before_any_noise_is_drawn(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"privacy": {"budget_epsilon": 2.0}})
    with pytest.raises(BudgetError):
        tiny.work(SILO)
    assert site.ledger_path.read_bytes() == b""
    assert not list((site.private / "draws").iterdir())
    assert not list((site.private / "checkpoints" / plan_id).iterdir())
    assert not (site.outbox / plan_id).exists()


def test_worker_draws_nothing_when_the_budget_shrank_during_training(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    tiny.work(SILO, until="audited")
    write_policy(site, POLICY | {"privacy": {"budget_epsilon": 2.0}})
    with pytest.raises(BudgetError):
        tiny.work(SILO)
    assert site.ledger_path.read_bytes() == b""
    assert not list((site.private / "draws").iterdir())


def test_site_takes_another_plan_after_giving_one_up(planned: PlannedFederation) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"privacy": {"budget_epsilon": 2.0}})
    with pytest.raises(BudgetError):
        tiny.work(SILO)
    assert withdraw_from_plan(site, tiny.key(SILO)).state == "withdrawn"
    # also what finishes one that was interrupted
    assert withdraw_from_plan(site, tiny.key(SILO)).state == "withdrawn"
    write_policy(site, POLICY)
    second = tiny.sign()
    tiny.deliver_plan(SILO, second)
    assert tiny.work(SILO).plan_id == second


def test_worker_takes_a_plan_whose_acceptance_was_interrupted(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    tiny.work(SILO, until="plan_accepted")
    state_path(site.private).unlink()
    shutil.rmtree(site.private / "checkpoints")
    assert tiny.work(SILO, until="scanned").plan_id == plan_id


def test_worker_refuses_a_plan_whose_expert_is_larger_than_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 40})
    tables = recipe().model_dump(mode="json")
    tables["limits"]["expert_bytes"] = 1000
    # which would say so first
    monkeypatch.setattr("aggregator.planning.draft.check_feasible", lambda *arguments: None)
    plan_id = tiny.sign(type(recipe()).model_validate_json(json.dumps(tables)))
    tiny.deliver_plan(SILO, plan_id)
    problem = tiny.work(SILO, until="plan_refused").problem
    assert problem is not None
    assert problem.code == 31
    assert "size of an expert" in problem.message


def test_worker_ignores_a_folder_in_the_inbox_that_is_no_plan(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    for name in ("foo", "..bar", "x" * 200):
        (tiny.sites[SILO].inbox / name / "bundle").mkdir(parents=True)
    assert tiny.work(SILO, until="plan_accepted").plan_id == plan_id


def test_worker_refuses_images_that_changed_after_they_were_scanned(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    tiny.work(SILO, until="assigned")
    path = tiny.path / "data.npz"
    with np.load(tiny.sites[SILO].settings().data) as archive:
        changed = archive["images"].copy()
        labels = archive["labels"]
    changed[0, 0, 0, 0] += 0.01 if changed[0, 0, 0, 0] < 0 else -0.01
    np.savez(path, images=changed, labels=labels)
    settings = tiny.sites[SILO].path / "silo.toml"
    old = tiny.sites[SILO].settings().data
    settings.write_text(settings.read_text().replace(old, str(path)))
    with pytest.raises(DataError, match="scanned"):
        tiny.work(SILO)


def test_worker_refuses_too_few_images_for_this_sites_policy(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    write_policy(tiny.sites[SILO], POLICY | {"training": {"min_images": 41}})
    with pytest.raises(DataError, match="at least 41"):
        tiny.work(SILO)


def test_worker_notes_the_progress_of_training_on_disk(
    planned: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, _ = planned
    monkeypatch.setattr("silo.worker.worker.NOTE_S", 0.0)
    seen: list[int] = []
    site = tiny.sites[SILO]
    worker = Worker(
        site, tiny.key(SILO), lambda state: seen.append(load_state(state_path(site.private)).step)
    )
    worker.begin()
    while worker.state.state != "audited":
        worker.step()
    assert max(seen) == worker.state.num_steps > 0


def test_worker_stops_at_the_audit_without_a_waiver(planned: PlannedFederation) -> None:
    tiny, plan_id = planned
    write_policy(tiny.sites[SILO], {"approval": {"kind": "policy"}})
    with pytest.raises(AuditError):
        tiny.work(SILO)
    assert tiny.sites[SILO].ledger_path.read_bytes() == b""
    assert not (tiny.sites[SILO].outbox / plan_id).exists()


def test_worker_waits_for_a_person_and_sends_only_the_digest_approved(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    digest = tiny.work(SILO, until="awaiting_approval").submission_digest
    with pytest.raises(ApprovalError):
        approve(site, "0" * 64)
    with pytest.raises(AssertionError, match="stands still"):
        tiny.work(SILO)
    assert not (site.outbox / plan_id).exists()
    approve(site, str(digest))
    tiny.work(SILO)
    sent = json.loads((site.outbox / plan_id / "1" / submission_path(SILO)).read_bytes())
    assert sent["approval"]["kind"] == "person"


def test_worker_refuses_to_send_when_a_reviewed_file_has_changed(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    approve(site, str(tiny.work(SILO, until="awaiting_approval").submission_digest))
    expert = site.private / "checkpoints" / plan_id / "experts" / SILO / "expert.safetensors"
    expert.write_bytes(expert.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ApprovalError, check=has_subject("expert.safetensors")):
        tiny.work(SILO)


def test_worker_keeps_the_same_draws_when_it_starts_again(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    tiny.work(SILO, until="released")
    releases = site.private / "checkpoints" / plan_id / "statistics"
    before = {path.name: path.read_bytes() for path in releases.iterdir()}
    entries = site.ledger_path.read_bytes()
    state = load_state(state_path(site.private))
    state_path(site.private).write_bytes(state.model_copy(update={"state": "audited"}).encode())
    tiny.work(SILO, until="released")
    assert {path.name: path.read_bytes() for path in releases.iterdir()} == before
    assert site.ledger_path.read_bytes() == entries


def test_worker_resubmits_after_a_refusal_with_a_new_sequence_and_a_person(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    tiny.work(SILO)
    tiny.collect(SILO, plan_id)
    known = tiny.federation.registry / "ledgers" / f"{SILO}.json"
    # which this site's ledger does not extend
    record_ledger(tiny.federation, SILO, "earlier-00000001", ("0" * 64,))
    tiny.take_in()
    known.unlink()
    tiny.deliver_receipt(SILO, plan_id)
    with pytest.raises(SubmissionRefusedError):
        tiny.work(SILO, until="accepted")
    digest = tiny.work(SILO, until="awaiting_approval").submission_digest
    with pytest.raises(AssertionError, match="stands still"):
        tiny.work(SILO)
    approve(site, str(digest))
    assert tiny.work(SILO).sequence == 2
    tiny.collect(SILO, plan_id, sequence=2)
    assert [receipt.verdict.kind for receipt in tiny.take_in()] == ["accepted"]
    tiny.deliver_receipt(SILO, plan_id, sequence=2)
    tiny.work(SILO, until="accepted")


def test_worker_believes_no_receipt_but_the_genuine_one(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    tiny.work(SILO)
    tiny.collect(SILO, plan_id)
    tiny.take_in()
    tiny.deliver_receipt(SILO, plan_id)
    path = tiny.sites[SILO].inbox / plan_id / "receipts" / "1.json"
    genuine = path.read_bytes()
    payload, _ = open_sealed(genuine, RECEIPT_KIND, None, 65536)
    receipt = json.loads(payload)
    own_key = load_key(tiny.federation, "receipts", PASSPHRASE)
    forged = {
        "junk": b"junk",
        "another key": seal(payload, RECEIPT_KIND, SigningKey.generate()),
        "another submission": seal(
            reworded(receipt, submission_digest="0" * 64), RECEIPT_KIND, own_key
        ),
        "another silo": seal(reworded(receipt, silo_id="south"), RECEIPT_KIND, own_key),
        "another sequence": seal(reworded(receipt, sequence=2), RECEIPT_KIND, own_key),
    }
    for name, data in forged.items():
        path.write_bytes(data)
        with pytest.raises(AssertionError, match="stands still"):
            tiny.work(SILO, until="accepted")
        assert not path.exists(), f"{name} stays in the way of the genuine receipt"
    path.write_bytes(genuine)
    assert tiny.work(SILO, until="accepted").state == "accepted"


def reworded(receipt: dict[str, object], **changes: object) -> bytes:
    return Receipt.model_validate_json(json.dumps(receipt | changes)).encode()


def run_worker(site: Site, *prefix: str) -> subprocess.Popen[bytes]:
    """Start the worker as its operator would, passphrase on standard input."""
    command = [
        *prefix,
        str(program("silo")),
        "run",
        str(site.path),
        "--only",
        "worker",
        "--passphrase-file",
        "-",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(PASSPHRASE + b"\n")
    process.stdin.close()
    return process


def watch(
    process: subprocess.Popen[bytes], seen: Callable[[], bool], what: str, limit_s: float = LIMIT_S
) -> None:
    """Wait until something shows, as long as the worker lives; between looks, wait on the worker itself."""
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline, f"not seen within {limit_s:.0f} s: {what}"
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
            assert seen(), f"the worker ended before {what}: {end(process)}"


def wait_for(site: Site, process: subprocess.Popen[bytes], wanted: str) -> None:
    watch(process, lambda: load_state(state_path(site.private)).state == wanted, wanted)


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> str:
    """Signal the worker, wait for its end, return what it said."""
    process.send_signal(number)
    process.wait(timeout=LIMIT_S)
    assert process.stderr is not None
    with process.stderr as errors:
        return errors.read().decode()


def test_worker_killed_in_training_ends_with_a_byte_identical_expert(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 40})
    plan_id = tiny.sign(recipe_of_many_steps())
    tiny.deliver_plan(SILO, plan_id)
    control = tiny.copy(tmp_path / "control")
    site = tiny.sites[SILO]
    set_training(site, checkpoint_s=0.0)

    def work() -> None:
        # so that it is caught in mid-training, however busy the machine
        os.nice(10)
        tiny.work(SILO)

    pid = fork_process(work)
    checkpoints = site.private / "checkpoints" / plan_id / "experts" / SILO / "training"
    wait_until(lambda: any(checkpoints.rglob("*.json")), "a checkpoint")
    os.kill(pid, signal.SIGKILL)
    assert wait_for_exit(pid) == -signal.SIGKILL
    assert load_state(state_path(site.private)).state == "training"
    assert not list(site.outbox.glob(f"{plan_id}/*"))
    torch.set_num_threads(1)  # as the forked process has
    try:
        tiny.work(SILO)
        control.work(SILO)
    finally:
        torch.set_num_threads(THREADS)
    sent = f"{plan_id}/1/silos/{SILO}/experts/{SILO}/expert.safetensors"
    assert (site.outbox / sent).read_bytes() == (control.sites[SILO].outbox / sent).read_bytes()


def recipe_of_many_steps(num_steps: int = 200) -> Recipe:
    """Return a recipe that trains for some seconds."""
    tables = recipe().model_dump(mode="json")
    tables["expert"]["training"] |= {"num_steps": num_steps}
    return Recipe.model_validate_json(json.dumps(tables))


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_worker_completes_a_plan_in_a_network_namespace_without_interfaces(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare (util-linux) is needed: apt-get install util-linux"
    prefix = (
        [unshare, "--net"] if os.geteuid() == 0 else [unshare, "--user", "--map-root-user", "--net"]
    )
    listing = [
        *prefix,
        sys.executable,
        "-c",
        "import socket; print([n for _, n in socket.if_nameindex()])",
    ]
    allowed = subprocess.run(listing, capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip("this system allows no network namespace")
    assert json.loads(allowed.stdout.replace("'", '"')) in (["lo"], [])
    site = tiny.sites[SILO]
    process = run_worker(site, *prefix)
    wait_for(site, process, "in_outbox")
    end(process)
    assert (site.outbox / plan_id / "1" / submission_path(SILO)).exists()


def test_second_worker_on_the_same_site_is_refused(planned: PlannedFederation) -> None:
    from ddm.errors import BusyError
    from ddm.io.locks import locked

    tiny, _ = planned
    site = tiny.sites[SILO]
    with locked(site.private, "worker"), pytest.raises(BusyError):
        Worker(site, tiny.key(SILO), lambda state: None).run()
