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

import pytest

from ddm.errors import ApprovalError, AuditError, BudgetError, SignatureError, SubmissionRefusedError
from ddm.processes import program
from silo.config import Site
from silo.outbox import submission_path
from silo.state import load_state
from silo.worker import Worker, approve, state_path
from tests.federation import PASSPHRASE, POLICY, TinyFederation, recipe, write_policy

SILO = "north"


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFederation, str]:
    """A federation whose plan has reached the silo's inbox."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("worker"), {"north": 40, "south": 30})
    plan_id = tiny.sign()
    tiny.deliver_plan(SILO, plan_id)
    return tiny, plan_id


def copy_of(tiny: TinyFederation, folder: Path) -> TinyFederation:
    shutil.copytree(tiny.path, folder)
    sites = {silo_id: Site(folder / silo_id) for silo_id in tiny.sites}
    return TinyFederation(folder, type(tiny.federation)(folder / "fed"), sites)


@pytest.fixture
def planned(planned_once: tuple[TinyFederation, str], tmp_path: Path) -> tuple[TinyFederation, str]:
    tiny, plan_id = planned_once
    return copy_of(tiny, tmp_path / "copy"), plan_id


def test_worker_refuses_a_plan_above_its_policy_before_touching_data(planned: tuple[TinyFederation, str]) -> None:
    tiny, _ = planned
    write_policy(tiny.sites[SILO], POLICY | {"privacy": {"max_epsilon": 3.0}})
    state = tiny.work(SILO, until="plan_refused")
    assert state.problem is not None
    assert state.problem.code == 31
    assert not (tiny.sites[SILO].private / "checkpoints").exists()
    assert not (tiny.sites[SILO].ledger_path).exists()


def test_worker_takes_a_refused_plan_after_the_policy_was_changed(planned: tuple[TinyFederation, str]) -> None:
    tiny, _ = planned
    write_policy(tiny.sites[SILO], POLICY | {"privacy": {"max_epsilon": 3.0}})
    tiny.work(SILO, until="plan_refused")
    write_policy(tiny.sites[SILO], POLICY)
    assert tiny.work(SILO, until="plan_accepted").problem is None


def test_worker_refuses_a_bundle_with_a_flipped_byte(planned: tuple[TinyFederation, str]) -> None:
    tiny, plan_id = planned
    path = tiny.sites[SILO].inbox / plan_id / "bundle" / "targets" / plan_id / "plan" / "sketch.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    state = tiny.work(SILO, until="plan_refused")
    assert state.problem is not None
    assert state.problem.code == 12
    assert "sketch.safetensors" in state.problem.message


def test_worker_refuses_a_plan_of_another_federation(planned: tuple[TinyFederation, str], tmp_path: Path) -> None:
    tiny, plan_id = planned
    stranger = TinyFederation.create(tmp_path / "stranger", {SILO: 20})
    strange_plan = stranger.sign()
    shutil.rmtree(tiny.sites[SILO].inbox / plan_id)
    shutil.copytree(stranger.federation.bundle(strange_plan), tiny.sites[SILO].inbox / strange_plan / "bundle")
    state = tiny.work(SILO, until="plan_refused")
    assert state.problem is not None
    assert state.problem.code in {10, 11, 19}


def test_worker_refuses_over_budget_before_noise_is_drawn(planned: tuple[TinyFederation, str]) -> None:
    tiny, plan_id = planned
    write_policy(tiny.sites[SILO], POLICY | {"privacy": {"budget_epsilon": 2.0}})
    with pytest.raises(BudgetError):
        tiny.work(SILO)
    site = tiny.sites[SILO]
    drawn = {path.name for path in (site.private / "checkpoints" / plan_id / "releases").glob("*")}
    assert "sketch.safetensors" not in drawn
    assert not (site.outbox / plan_id).exists()


def test_worker_stops_at_the_audit_without_a_waiver(planned: tuple[TinyFederation, str]) -> None:
    tiny, plan_id = planned
    write_policy(tiny.sites[SILO], {"approval": {"kind": "policy"}})
    with pytest.raises(AuditError):
        tiny.work(SILO)
    assert not tiny.sites[SILO].ledger_path.exists()
    assert not (tiny.sites[SILO].outbox / plan_id).exists()


def test_worker_waits_for_a_person_and_sends_only_the_digest_approved(planned: tuple[TinyFederation, str]) -> None:
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


def test_worker_refuses_to_send_when_a_reviewed_file_has_changed(planned: tuple[TinyFederation, str]) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    approve(site, str(tiny.work(SILO, until="awaiting_approval").submission_digest))
    expert = site.private / "checkpoints" / plan_id / "expert.safetensors"
    expert.write_bytes(expert.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ApprovalError, match="expert.safetensors"):
        tiny.work(SILO)


def test_worker_keeps_the_same_draws_when_it_starts_again(planned: tuple[TinyFederation, str]) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    tiny.work(SILO, until="released")
    releases = site.private / "checkpoints" / plan_id / "releases"
    before = {path.name: path.read_bytes() for path in releases.iterdir()}
    entries = site.ledger_path.read_bytes()
    state = load_state(state_path(site))
    state_path(site).write_bytes(state.to("audited").encode())
    tiny.work(SILO, until="released")
    assert {path.name: path.read_bytes() for path in releases.iterdir()} == before
    assert site.ledger_path.read_bytes() == entries


def test_worker_resubmits_after_a_refusal_with_a_new_sequence_and_a_person(
    planned: tuple[TinyFederation, str],
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    tiny.work(SILO)
    arrived = tiny.collect(SILO, plan_id)
    (arrived / "extra").write_bytes(b"x")
    tiny.take_in()
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


def test_worker_refuses_a_receipt_by_another_key(planned: tuple[TinyFederation, str]) -> None:
    from ddm.trust.envelope import open_sealed, seal
    from ddm.trust.keys import SigningKey

    tiny, plan_id = planned
    tiny.work(SILO)
    tiny.collect(SILO, plan_id)
    tiny.take_in()
    tiny.deliver_receipt(SILO, plan_id)
    path = tiny.sites[SILO].inbox / plan_id / "receipts" / "1.json"
    payload, _ = open_sealed(path.read_bytes(), "receipt", None, 65536)
    path.write_bytes(seal(payload, "receipt", SigningKey.generate()))
    with pytest.raises(SignatureError):
        tiny.work(SILO, until="accepted")


def run_worker(site: Site, *prefix: str) -> subprocess.Popen[bytes]:
    """Start the worker as its operator would, passphrase on standard input."""
    command = [*prefix, str(program("silo")), "run", str(site.path), "--only", "worker", "--passphrase-file", "-"]
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


def watch(process: subprocess.Popen[bytes], seen: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
    """Wait until something shows, as long as the worker lives; between looks, wait on the worker itself."""
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline, f"not seen within {limit_s:.0f} s: {what}"
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
            assert seen(), f"the worker ended before {what}: {end(process)}"


def wait_for(site: Site, process: subprocess.Popen[bytes], wanted: str) -> None:
    watch(process, lambda: load_state(state_path(site)).state == wanted, wanted)


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> str:
    """Signal the worker, wait for its end, return what it said."""
    process.send_signal(number)
    process.wait(timeout=60)
    assert process.stderr is not None
    with process.stderr as errors:
        return errors.read().decode()


def test_worker_killed_in_training_ends_with_a_byte_identical_expert(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 40})
    plan_id = tiny.sign(recipe_of_many_steps())
    tiny.deliver_plan(SILO, plan_id)
    control, killed = tiny, copy_of(tiny, tmp_path / "killed")
    experts = []
    for one, kill in ((killed, True), (control, False)):
        site = one.sites[SILO]
        process = run_worker(site)
        if kill:
            wait_for(site, process, "training")
            checkpoints = site.private / "checkpoints" / plan_id / "training"
            watch(process, lambda folder=checkpoints: any(folder.rglob("*.json")), "a checkpoint")
            end(process, signal.SIGKILL)
            assert load_state(state_path(site)).state == "training"
            assert not list(site.outbox.glob(f"{plan_id}/*"))
            process = run_worker(site)
        wait_for(site, process, "in_outbox")
        end(process)
        sent = site.outbox / plan_id / "1" / "silos" / SILO / "experts" / SILO / "expert.safetensors"
        experts.append(sent.read_bytes())
    assert experts[0] == experts[1]


def recipe_of_many_steps():  # type: ignore[no-untyped-def]
    tables = recipe().model_dump(mode="json")
    tables["expert"]["training"] |= {"num_steps": 400, "checkpoint_steps": 20}
    return type(recipe()).model_validate_json(json.dumps(tables))


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_worker_completes_a_plan_in_a_network_namespace_without_interfaces(
    planned: tuple[TinyFederation, str],
) -> None:
    tiny, plan_id = planned
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare (util-linux) is needed: apt-get install util-linux"
    prefix = [unshare, "--net"] if os.geteuid() == 0 else [unshare, "--user", "--map-root-user", "--net"]
    listing = [*prefix, sys.executable, "-c", "import socket; print([n for _, n in socket.if_nameindex()])"]
    allowed = subprocess.run(listing, capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip("this system allows no network namespace")
    assert json.loads(allowed.stdout.replace("'", '"')) in (["lo"], [])
    site = tiny.sites[SILO]
    process = run_worker(site, *prefix)
    wait_for(site, process, "in_outbox")
    end(process)
    assert (site.outbox / plan_id / "1" / submission_path(SILO)).exists()


def test_second_worker_on_the_same_site_is_refused(planned: tuple[TinyFederation, str]) -> None:
    from ddm.errors import BusyError
    from ddm.files import locked

    tiny, _ = planned
    site = tiny.sites[SILO]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with locked(site.private, "worker"), pytest.raises(BusyError):
            Worker(site, tiny.key(SILO), lambda state: None).run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
