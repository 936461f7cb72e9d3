"""A silo that trains in several processes: the same expert, no key in them, no port to the outside, none left over."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from ddm.errors import SetupError
from ddm.system.process_table import descendants
from silo.config import Site
from silo.worker.state import load_state, state_path
from silo.worker.worker import Worker
from tests.silo.worker.test_worker import end, recipe_of_many_steps, run_worker, wait_for, watch
from tests.support.federation import PlannedFederation, TinyFederation, set_training
from tests.support.processes import is_running, wait_for_end
from tests.support.waiting import LIMIT_S

SILO = "north"
TOLERANCE = 2e-5
OURS = [b"-P", b"-m", b"ddm.training"]
LISTENING = "0A"
LOOPBACK = "0100007F"  # as the kernel writes them


@pytest.fixture
def planned(planned_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    """A federation whose plan has reached the silo's inbox."""
    return planned_once.copy(tmp_path / "tiny")


def training_processes(pid: int) -> list[int]:
    """The processes below one that train, without their guards."""
    own_pids = list[int]()
    for child in descendants(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # another one, which has just ended
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1:4] == OURS:
                own_pids.append(child)
    return own_pids


def holds(pid: int, secret: bytes) -> bool:
    """Whether a process has something in the memory that it can write."""
    is_held = False
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            begin, finish, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
            if rights.startswith("rw") and "[v" not in line:
                memory.seek(int(begin, 16))
                try:
                    is_held |= secret in memory.read(int(finish, 16) - int(begin, 16))
                except OSError:  # mapped, but nothing is there
                    continue
    return is_held


def listening(pid: int) -> Iterator[str]:
    """The addresses at which a process takes connections, as the kernel writes them."""
    own = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                yield fields[1].partition(":")[0]


def opened(pid: int) -> set[str]:
    """What a process has open: files, and pipes and sockets by their numbers."""
    names = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            names.add(str(link.readlink()))
    return {link for link in names if not link.startswith(("/dev/", "anon_inode:"))}


@contextmanager
def looked_into(pid: int, look: Callable[[list[int]], None]) -> Iterator[set[str]]:
    """Hold the processes below one that train, once both have taken connections, and look at them and their guards.

    Yields:
        The addresses at which they take connections, as they are heard of.
    """
    stopped = threading.Event()
    others = set(descendants(pid))
    addresses = set[str]()

    def wait_and_look() -> None:
        heard = set[int]()
        pids = list[int]()
        while len(heard) < 2:
            if stopped.wait(0.005):
                return
            pids = training_processes(pid)
            for child in pids:
                with suppress(FileNotFoundError, ProcessLookupError):
                    if bound := set(listening(child)):
                        heard.add(child)
                        addresses.update(bound)
        for child in pids:
            os.kill(child, signal.SIGSTOP)
        try:
            look([child for child in descendants(pid) if child not in others])
        finally:
            for child in pids:
                os.kill(child, signal.SIGCONT)

    thread = threading.Thread(target=wait_and_look)
    thread.start()
    try:
        yield addresses
    finally:
        stopped.set()
        thread.join()


def expert(site: Site) -> bytes:
    """The expert as it leaves."""
    (path,) = site.outbox.glob(f"*/1/silos/{SILO}/experts/{SILO}/expert.safetensors")
    return path.read_bytes()


def weights(site: Site) -> Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load(expert(site)).items())])


def test_silo_trains_the_same_expert_in_two_processes_without_its_key_or_a_port_to_the_outside(
    planned: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.worker.worker.NOTE_S", 0.0)
    tiny, plan_id = planned
    alone = tiny.copy(tmp_path / "alone")
    site = tiny.sites[SILO]
    key = tiny.key(SILO)
    set_training(site, processes=2, device="cpu")
    secret = key._private.private_bytes_raw()
    held = dict[int, bool]()
    shared = dict[int, set[str]]()

    def look(pids: list[int]) -> None:
        for pid in pids:
            held[pid] = holds(pid, secret)
            shared[pid] = opened(pid) & opened(os.getpid())

    worker = Worker(site, key, lambda state: None)
    worker.begin()
    with looked_into(os.getpid(), look) as addresses:
        while worker.state.state != "in_outbox":
            worker.step()
    assert list(held.values()) == [False] * 4, (
        "two processes, the command that starts them, and its guard"
    )
    assert [len(names - {site.settings().data}) for names in shared.values()] == [2, 0, 0, 0], (
        "a guard has two pipes"
    )
    assert holds(os.getpid(), secret), "the search finds a key that is there"
    assert addresses == {LOOPBACK}
    assert not any(map(is_running, held))
    alone.work(SILO)
    assert 0 < float((weights(site) - weights(alone.sites[SILO])).abs().max()) < TOLERANCE
    tiny.collect(SILO, plan_id)
    assert [receipt.verdict.kind for receipt in tiny.take_in()] == ["accepted"]


@pytest.fixture
def long(tmp_path: Path) -> TinyFederation:
    """A federation whose silo trains long enough to be interrupted three times on a fast machine, in two processes."""
    made = TinyFederation.create(tmp_path / "tiny", {SILO: 40})
    made.deliver_plan(SILO, made.sign(recipe_of_many_steps(2000)))
    set_training(made.sites[SILO], processes=2, device="cpu", checkpoint_s=0.0)
    return made


def under_way(site: Site, process: subprocess.Popen[bytes]) -> list[int]:
    """Wait until a worker has written another checkpoint; return the processes that train."""
    before = steps(site)
    watch(process, lambda: bool(steps(site) - before), "another checkpoint")
    return training_processes(process.pid)


def steps(site: Site) -> set[str]:
    return {path.name for path in (site.private / "checkpoints").rglob("step-*.json")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_silo_ends_with_the_same_bytes_when_it_was_killed_or_stopped_and_when_one_of_its_processes_was_killed(
    long: TinyFederation, tmp_path: Path
) -> None:
    control = long.copy(tmp_path / "control").sites[SILO]
    site = long.sites[SILO]
    process = run_worker(site)
    pids = under_way(site, process)
    end(process, signal.SIGKILL)
    assert len(pids) == 2
    for pid in pids:
        wait_for_end(pid)

    process = run_worker(site)
    pids = under_way(site, process)
    for pid in pids:  # as a service manager does, to everyone at once
        os.kill(pid, signal.SIGTERM)
    end(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        not any(map(is_running, pids)) and load_state(state_path(site.private)).state == "training"
    )

    process = run_worker(site)
    pids = under_way(site, process)
    os.kill(pids[-1], signal.SIGKILL)
    process.wait(timeout=LIMIT_S)
    said = end(process)
    assert process.returncode == SetupError.exit_code
    assert "training process" in said and "SIGKILL" in said and "Traceback" not in said
    assert len(said.splitlines()) < 10

    for silo_site in (site, control):
        process = run_worker(silo_site)
        wait_for(silo_site, process, "in_outbox")
        end(process)
    assert expert(site) == expert(control)
