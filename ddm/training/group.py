"""How the processes of one training find each other, and how they check that they talk with nobody else.

`ddm.training.local`, Kubernetes' operators and others say in the environment which process this is; srun and mpirun use
variables of their own. The processes meet in a file in the job's folder, which all of them see and nobody else can
open, so nothing listens for it. They take no meeting point from the environment: torch's store at an address
(`MASTER_ADDR`) listens on all addresses, and anybody who reaches it says where each process connects to.

torchrun is refused. Its agents unpickle what they read from such a store, so anybody who reaches it runs commands
there.

Processes that train together do not authenticate each other: who is quick can connect in the place of one of them, to
read weights or to change them. So each writes into the file which connections it has, and trains once every other end
of its own is one of another process's.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ddm.errors import SetupError, TrustError
from ddm.system.peers import Connection, own_connections
from ddm.training.config import TORCHRUN_REMEDY
from ddm.training.job import process_name

# How long one waits for another's part, who may be writing a checkpoint of 50 GB or compiling.
PATIENCE_S = 30 * 60.0
_ON_ONE_NODE = ("SLURM_STEP_NUM_NODES", "1")
# The rank, the number of processes, the rank on its machine. Slurm's variables are those of a step: it tells a batch
# script, too, which task of a step it would be.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_ATTEMPT_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
# Set by torchrun's agent in each process that it starts.
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
# The meeting points of another training, in whose shell a command was typed perhaps. With the last one, NCCL takes
# connections from anybody who knows a constant, and otherwise from anybody who knows a random number of this training.
_MEETING_POINTS = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID")
# With it gloo connects when it sends, after the connections were compared.
_LATE_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class Member:
    """One of the processes of a training.

    Attributes:
        rank: its number, from 0.
        num: how many there are.
        local_rank: its number on its machine.
        on_one_machine: whether all are known to be on one.
        attempt: differs between starts that a scheduler makes by itself.
    """

    rank: int
    num: int
    local_rank: int
    on_one_machine: bool
    attempt: str = ""

    @property
    def name(self) -> str:
        """How errors call it."""
        return process_name(self.rank, self.num)


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Refuse to train in a process that torchrun, or `accelerate launch`, has started.

    Raises:
        TrustError: it is one.
    """
    if _OF_TORCHRUN in environment:
        raise TrustError(
            "torchrun",
            expected="a launcher that takes no commands from other programs on the network",
            got="an agent of torchrun, which unpickles what is sent to its store",
            remedy=TORCHRUN_REMEDY,
        )


def member_of(environment: Mapping[str, str]) -> Member:
    """Return which process this is, as the environment says; the only one where it says nothing.

    Raises:
        SetupError: the variables contradict each other.
        TrustError: torchrun has started it.
    """
    refuse_torchrun(environment)
    for rank_name, num_name, local_name in _VARIABLES:
        if rank_name in environment and num_name in environment:
            return _member(environment, rank_name, num_name, local_name)
    return Member(0, 1, 0, on_one_machine=True)


def _member(
    environment: Mapping[str, str], rank_name: str, num_name: str, local_name: str
) -> Member:
    try:
        rank = int(environment[rank_name])
        num = int(environment[num_name])
        local_rank = int(environment.get(local_name, "0"))
        is_valid = 0 <= rank < num and 0 <= local_rank < num
    except ValueError:
        is_valid = False
    if not is_valid:
        raise SetupError(
            f"{rank_name} and {num_name}",
            expected="the number of this process, from 0, and how many there are",
            got="other values in the environment",
            remedy="Start the processes with srun or mpirun, or set both.",
        )
    name, value = _ON_ONE_NODE
    on_one_machine = (
        num == 1
        or environment.get("LOCAL_WORLD_SIZE") == str(num)
        or environment.get(name) == value
    )
    attempt = "-".join(environment.get(name, "") for name in _ATTEMPT_VARIABLES)
    return Member(rank, num, local_rank, on_one_machine, attempt)


def enter_group_environment(member: Member) -> None:
    """Set the variables that accelerate and torch read, and remove those that would lead to somebody else."""
    import torch

    for name in (*_MEETING_POINTS, _LATE_CONNECTIONS):
        os.environ.pop(name, None)
    local_rank = member.local_rank
    if torch.cuda.is_available():
        # A scheduler may show each process its own GPU alone, which then is the first that it sees.
        local_rank %= torch.cuda.device_count()
    os.environ |= {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(member.num),
        "LOCAL_RANK": str(local_rank),
        # Otherwise accelerate asks for the meeting point of processes on several machines, which have met already.
        "LOCAL_WORLD_SIZE": str(member.num),
    }
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if member.on_one_machine:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def join_group(member: Member, folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Join torch's process group.

    Args:
        member: this process.
        folder: the folder of this start of the job, where its processes meet; nobody else may write in it.
        patience_s: how long each waits for another.

    Raises:
        SetupError: the others are not there.
        TrustError: somebody else is connected with this process.
    """
    from torch import distributed

    patience = timedelta(seconds=patience_s)
    earlier_connections = own_connections()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # As a store, because of a file's URL torch makes another path where that has a space or an umlaut.
        path = str(folder / f"rendezvous{member.attempt}")
        store = distributed.FileStore(path, member.num)  # type: ignore[attr-defined]
        store.set_timeout(patience)
        # Without a backend named, torch takes gloo for tensors on the CPU and NCCL for those on a GPU.
        distributed.init_process_group(
            store=store, rank=member.rank, world_size=member.num, timeout=patience
        )
        # Now all of gloo's connections are there. NCCL's come with the first tensor on a GPU, and only from who knows
        # the random number that the file holds.
        connections = own_connections() - earlier_connections
        store.set(f"connections/{member.rank}", _encode(connections))
        keys = [f"connections/{rank}" for rank in range(member.num)]
        store.wait(keys)
        of_all = [_decode(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise SetupError(
            member.name,
            expected="the other processes of this training",
            got=str(error).splitlines()[0][-200:],
            remedy="On one machine, check that `ip address show lo` is up with 127.0.0.1, and that a service's rules "
            "allow AF_INET; on several, name the network between them in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        ) from error
    num_others = member.num - 1
    if sys.platform == "linux" and len(connections) < num_others:
        # Where the kernel does not list them, nothing is known of their other ends.
        raise TrustError(
            member.name,
            expected=f"at least {num_others} connections, as gloo has one with each other process",
            got=f"{len(connections)}, as the kernel lists them in /proc/self/net/tcp",
            remedy="Train where Linux itself runs the processes, or set training.processes = 1.",
        )
    if has_stranger(connections, of_all):
        raise TrustError(
            member.name,
            expected="connections with the other processes of this training alone",
            got="a connection to another program",
            remedy="Find out who connects to the ports of others on this machine or network; training.processes = 1 "
            "opens none. Between machines whose addresses are translated, processes cannot train together.",
        )


def has_stranger(connections: frozenset[Connection], of_all: list[frozenset[Connection]]) -> bool:
    """Whether a connection has another end that no process of the training has.

    Args:
        connections: of this process.
        of_all: of each process, as it wrote.
    """
    known_ends = frozenset().union(*of_all)
    return any((remote, local) not in known_ends for local, remote in connections)


def _encode(connections: frozenset[Connection]) -> str:
    """Return connections as the text that a process writes for the others."""
    return json.dumps(sorted(connections))


def _decode(text: bytes) -> frozenset[Connection]:
    """Return the connections that another process wrote."""
    return frozenset((str(local), str(remote)) for local, remote in json.loads(text))
