"""The attack: a host of the network takes a place among the processes of a training on several machines."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddm.errors import TrustError
from ddm.training.config import TrainingSettings
from tests.support.jobs import SmallJob, small_task
from tests.support.namespaces import AVAILABLE, Switch, network_switch
from tests.support.waiting import wait_until

ADDRESSES = {"one": "10.213.9.1", "two": "10.213.9.2", "stranger": "10.213.9.3"}
# Two processes on two hosts, the second of which starts once the file GO is there.
START = """
export GLOO_SOCKET_IFNAME=cable0 WORLD_SIZE=2 LOCAL_RANK=0
RANK=0 {one} "$1" -P -m ddm.training "$2" --launch "$3" &
until [ -e {go} ]; do sleep 0.1; done
RANK=1 {two} "$1" -P -m ddm.training "$2" --launch "$3" &
wait
"""
# Looks for a port that is open, and connects to it as the second process of a group would.
STRANGER = """
import socket, struct, sys
connections = []
while not connections:
    for port in range(32768, 61000):
        connection = socket.socket()
        try:
            connection.connect((sys.argv[1], port))
        except OSError:
            connection.close()
            continue
        for number in range(4):
            connections.append(socket.create_connection((sys.argv[1], port)))
            connections[-1].sendall(struct.pack("<q", number))
        connection.close()
        break
print("connected", flush=True)
sys.stdin.read()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AVAILABLE, reason="needs root and iproute2 for network namespaces"),
]


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    """Three hosts."""
    with network_switch(ADDRESSES) as hosts:
        yield hosts


def trial_of(folder: Path, switch: Switch) -> tuple[SmallJob, Path]:
    """A job of two hosts, and the file for which the second waits."""
    go = folder / "go"
    hosts = {host: " ".join(switch.command_prefix(host)) for host in ("one", "two")}
    start = folder / "start.sh"
    start.write_text(START.format(go=go, **hosts))
    words = ("bash", str(start), "{python}", "{folder}", "{launch}")
    settings = TrainingSettings(device="cpu", processes=2, launcher=words)
    return SmallJob(folder, settings, small_task(num_steps=10)), go


@contextmanager
def stranger(switch: Switch, folder: Path) -> Iterator[Path]:
    """A host that looks for a port of the first process; yield a file that is there once it has connected."""
    connected = folder / "connected"
    command = [
        *switch.command_prefix("stranger"),
        sys.executable,
        "-I",
        "-c",
        STRANGER,
        ADDRESSES["one"],
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout

        def note() -> None:
            if output.readline() == "connected\n":
                connected.touch()

        thread = threading.Thread(target=note)
        thread.start()
        try:
            yield connected
        finally:
            process.kill()
            thread.join()


def test_two_hosts_train_together_through_the_folder_alone(tmp_path: Path, switch: Switch) -> None:
    trial, go = trial_of(tmp_path, switch)
    go.touch()
    trial()
    assert trial.expert.exists()


def test_host_that_connects_in_a_process_s_place_is_refused(tmp_path: Path, switch: Switch) -> None:
    trial, go = trial_of(tmp_path, switch)
    with stranger(switch, tmp_path) as connected:

        def let_second_process_start() -> None:
            wait_until(connected.exists, "the stranger's connection")
            go.touch()

        thread = threading.Thread(target=let_second_process_start)
        thread.start()
        try:
            with pytest.raises(TrustError, match="connections with the other processes of this"):
                trial()
        finally:
            thread.join()
    assert not trial.folder.result.exists()
