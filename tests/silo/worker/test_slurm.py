"""A silo that trains on the two nodes of a real Slurm: it goes on after either side's death, to the same bytes."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.planning.recipe import Recipe
from ddm.training.job import Launch, read_document
from silo.config import Site
from silo.worker.state import load_state, state_path
from tests.silo.worker.test_processes import expert, holds, steps
from tests.silo.worker.test_worker import end, run_worker, wait_for, watch
from tests.support.federation import PASSPHRASE, TinyFederation, recipe, set_training
from tests.support.processes import is_running
from tests.support.slurm import NODES, missing_programs, run_slurm
from tests.support.waiting import wait_until

SILO = "north"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"needs Slurm, Debian's slurm-wlm and munge: no {', '.join(missing_programs())}",
    ),
]
SRUN = (
    *(
        "env",
        "GLOO_SOCKET_IFNAME=lo",
        "srun",
        "--nodes=2",
        "--ntasks={processes}",
        "--kill-on-bad-exit=1",
    ),
    *("{python}", "-P", "-m", "ddm.training", "{folder}", "--launch", "{launch}"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two nodes."""
    with run_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def planned(
    tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> TinyFederation:
    """A federation whose silo trains for some seconds."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster[name])
    made = TinyFederation.create(tmp_path / "tiny", {SILO: 40})
    tables = recipe().model_dump(mode="json")
    tables["expert"]["training"] |= {"num_steps": 800}
    made.deliver_plan(SILO, made.sign(Recipe.model_validate_json(json.dumps(tables))))
    return made


def on_slurm(site: Site, jobs: Path) -> None:
    set_training(
        site, device="cpu", processes=2, launcher=SRUN, jobs=jobs, threads=1, checkpoint_s=0.0
    )


def tasks(jobs: Path) -> dict[str, int]:
    """The processes of a job that train, by their nodes."""
    pids = dict[str, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            known = (entry / "environ").read_bytes()
        except OSError:
            continue
        node = re.search(rb"SLURMD_NODENAME=(\w+)", known)
        if (
            b"ddm.training" in words[1:4]
            and node
            and any(word.startswith(bytes(jobs)) for word in words)
        ):
            pids[node[1].decode()] = int(entry.name)
    return pids


def launches(jobs: Path) -> list[Path]:
    return sorted(jobs.glob("*/*/*/runs/*"))


def under_way(jobs: Path, process: subprocess.Popen[bytes]) -> dict[str, int]:
    """Wait until a job has written another checkpoint; return its processes."""
    before = written(jobs)
    watch(
        process,
        lambda: bool(written(jobs) - before) and len(tasks(jobs)) == 2,
        "another checkpoint",
    )
    return tasks(jobs)


def written(jobs: Path) -> set[str]:
    return {path.name for path in jobs.rglob("step-*.json")}


def test_job_goes_on_when_either_node_s_process_is_killed_and_when_the_worker_is(
    planned: TinyFederation, tmp_path: Path
) -> None:
    control = planned.copy(tmp_path / "control").sites[SILO]
    site = planned.sites[SILO]
    jobs = tmp_path / "jobs"
    on_slurm(site, jobs)
    process = run_worker(site)
    pids = under_way(jobs, process)
    assert sorted(pids) == list(NODES)
    secret = planned.key(SILO)._private.private_bytes_raw()
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)  # else they might end meanwhile
    for pid in pids.values():
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        )
        assert not holds(pid, secret) and PASSPHRASE not in words
        assert not any(
            str(site.private) in str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()
        )
    os.kill(pids[NODES[1]], signal.SIGKILL)
    os.kill(pids[NODES[0]], signal.SIGCONT)

    wait_until(lambda: len(launches(jobs)) == 2, "another start", every_s=0.2)
    pids = under_way(jobs, process)
    end(process, signal.SIGKILL)
    assert all(map(is_running, pids.values())), "the job outlives the worker"
    before = read_document(Launch, next(jobs.glob("*/*/*/launch.json")))
    process = run_worker(site)
    wait_until(lambda: load_state(state_path(site.private)).step > 0, "progress")
    if launches := list(jobs.glob("*/*/*/launch.json")):
        assert read_document(Launch, launches[0]) == before, "the same job is followed"
    wait_for(site, process, "in_outbox")
    end(process)
    assert not tasks(jobs) and not list(jobs.rglob("*.npy")), "the copies of the images are gone"

    set_training(control, device="cpu", processes=2)
    process = run_worker(control)
    wait_for(control, process, "in_outbox")
    end(process)
    assert expert(site) == expert(control)


def test_stopped_worker_stops_the_job_and_another_goes_on_from_its_checkpoint(
    planned: TinyFederation, tmp_path: Path
) -> None:
    site = planned.sites[SILO]
    jobs = tmp_path / "jobs"
    on_slurm(site, jobs)
    process = run_worker(site)
    under_way(jobs, process)
    end(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not tasks(jobs), "the end of the job")
    last = max(written(jobs))
    process = run_worker(site)
    watch(process, lambda: max(written(jobs), default="") > last, "a later checkpoint")
    wait_for(site, process, "in_outbox")
    end(process)
    assert not steps(site)
