"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, on loopback, in a folder of its own."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddm.system.processes import free_port
from tests.support.waiting import wait_until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "munged", "mungekey")
NODES = ("first", "second")
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"


def missing_programs() -> list[str]:
    """The programs that are not installed; Debian's packages slurm-wlm and munge bring them."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def _program(name: str) -> str:
    path = shutil.which(name, path=_PATH)
    assert path is not None, f"{name} is not installed"
    return path


@contextmanager
def run_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run it until the block ends; yield the environment in which its commands find it."""
    munge = folder / "munge"
    state = folder / "state"
    for directory in (folder, munge, state):
        directory.mkdir(mode=0o711, exist_ok=True)
    for directory in folder.absolute().parents:  # munged wants to be reachable
        if directory.stat().st_uid == os.getuid() and directory != Path("/"):
            with suppress(PermissionError):
                directory.chmod(directory.stat().st_mode | 0o111)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object, log: str) -> None:
        with (folder / log).open("wb") as out:
            started.append(
                subprocess.Popen(
                    [str(word) for word in words], stdout=out, stderr=out, env=environment
                )
            )

    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        subprocess.run([_program("mungekey"), "--create", f"--keyfile={munge / 'key'}"], check=True)
        files = (f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed"))
        start(
            _program("munged"),
            "--foreground",
            "--force",
            f"--socket={munge / 'socket'}",
            *files,
            log="munged.out",
        )
        wait_until((munge / "socket").exists, "munged")
        (folder / "slurm.conf").write_text(_configuration(folder))
        start(_program("slurmctld"), "-D", "-f", folder / "slurm.conf", log="slurmctld.out")
        for node in NODES:
            start(
                _program("slurmd"), "-D", "-N", node, "-f", folder / "slurm.conf", log=f"{node}.out"
            )
        wait_until(lambda: _num_idle(environment) == len(NODES), "two idle nodes", every_s=0.5)
        yield environment
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _num_idle(environment: dict[str, str]) -> int:
    words = [_program("sinfo"), "--noheader", "--Node", "--format=%t"]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return result.stdout.split().count("idle")


def _configuration(folder: Path) -> str:
    user = getpass.getuser()
    host = socket.gethostname()
    ports = [free_port() for _ in range(len(NODES) + 1)]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    said = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "AuthType": "auth/munge",
        "CryptoType": "crypto/munge",
        "AuthInfo": f"socket={folder / 'munge' / 'socket'}",
        "SlurmUser": user,
        "SlurmdUser": user,
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",  # no cgroups
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SchedulerType": "sched/builtin",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "JobAcctGatherType": "jobacct_gather/none",
        "ReturnToService": 2,
    }
    lines = [f"{name}={value}" for name, value in said.items()]
    partition = f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
    return "\n".join([*lines, *nodes, partition]) + "\n"
