"""How the processes of one training find each other, whoever started them, and whether they talk with nobody else.

torchrun, Kubernetes' operators and `ddm.training.local` say in the environment which process this is; srun and mpirun
use variables of their own. Where no meeting point is named (`MASTER_ADDR`), it is a file in the job's folder, which all
of them see, so that nothing listens for it.

Processes that train together do not authenticate each other: another user of the machine who is quick can connect in
the place of one of them, to read weights or to change them. On one machine the kernel knows whose each connection is.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ddm.errors import SetupError, TrustError
from ddm.system.peers import tcp_sockets
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


def member_of(environment: Mapping[str, str]) -> Member:
    """Return which process this is, as the environment says; the only one where it says nothing.

    Raises:
        SetupError: the variables contradict each other.
    """
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
            remedy="Start the processes with torchrun or srun, which set both.",
        )
    name, value = _ON_ONE_NODE
    on_one_machine = (
        num == 1
        or environment.get("LOCAL_WORLD_SIZE") == str(num)
        or environment.get(name) == value
    )
    attempt = "-".join(environment.get(name, "") for name in _ATTEMPT_VARIABLES)
    return Member(rank, num, local_rank, on_one_machine, attempt)


def torch_environment(member: Member, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that accelerate and torch read, named as torchrun names them."""
    import torch

    local_rank = member.local_rank
    if torch.cuda.is_available():
        # A scheduler may show each process its own GPU alone, which then is the first that it sees.
        local_rank %= torch.cuda.device_count()
    variables = {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(member.num),
        "LOCAL_RANK": str(local_rank),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
    }
    if "MASTER_ADDR" not in environment:
        # Otherwise accelerate asks for the meeting point of processes on several machines, which have met already.
        variables["LOCAL_WORLD_SIZE"] = str(member.num)
    return variables


def join_group(member: Member, folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Join torch's process group.

    Args:
        member: this process.
        folder: of this start of the job, where its processes meet unless the environment names a place.
        patience_s: how long each waits for another.

    Raises:
        SetupError: the others are not there.
        TrustError: a process of another user took part.
    """
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(seconds=patience_s)
    try:
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            tcp_store, rank, num = next(rendezvous("env://", timeout=patience))
            tcp_store.set_timeout(patience)
            # torchrun keeps its store when it starts processes again: without a prefix of its own, a process may read
            # where one of the dead ones listened, and wait for it.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            distributed.init_process_group(
                store=distributed.PrefixStore(f"attempt-{attempt}", tcp_store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=num,
                timeout=patience,
            )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # As a store, because of a file's URL torch makes another path where that has a space or an umlaut.
            path = str(folder / f"rendezvous{member.attempt}")
            store = distributed.FileStore(path, member.num)  # type: ignore[attr-defined]
            store.set_timeout(patience)
            # Without a backend named, torch takes gloo for tensors on the CPU and NCCL for those on a GPU.
            distributed.init_process_group(
                store=store, rank=member.rank, world_size=member.num, timeout=patience
            )
            # Whose a connection is shows once it has been accepted, which torch waits for at one of its ends alone.
            store.set(f"met/{member.rank}", "")
            store.wait([f"met/{rank}" for rank in range(member.num)])
    except RuntimeError as error:
        raise SetupError(
            member.name,
            expected="the other processes of this training",
            got=str(error).splitlines()[0][-200:],
            remedy="On one machine, check that `ip address show lo` is up with 127.0.0.1, and that a service's rules "
            "allow AF_INET; on several, name the network between them in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        ) from error
    # After the group has met, since only then all connections are there to be looked at.
    if member.on_one_machine and "MASTER_ADDR" not in os.environ and has_foreign_peers():
        raise TrustError(
            member.name,
            expected="connections with its own user's processes alone",
            got="a connection with a process of another user",
            remedy="Find out who connects to the ports of others on this machine; training.processes = 1 opens none.",
        )


def has_foreign_peers() -> bool:
    """Whether a TCP connection of this process is with anybody but a process of its own user on this machine.

    An end that the kernel does not list counts as foreign, and so does one whose process has yet to accept the
    connection, or has closed it. Only Linux lists them; elsewhere the answer is no.
    """
    if sys.platform != "linux":
        return False
    sockets = tcp_sockets()
    user_of_ends = {(socket.local, socket.remote): socket.user for socket in sockets}
    own_inodes = _socket_inodes()
    for socket in sockets:
        if socket.inode not in own_inodes or socket.listening:
            continue
        # The other end of a connection within this machine is a row with the two addresses exchanged.
        if user_of_ends.get((socket.remote, socket.local)) != os.getuid():
            return True
    return False


def _socket_inodes() -> set[str]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # It may have been closed since.
        with suppress(FileNotFoundError):
            link = str(descriptor.readlink())
            if link.startswith("socket:["):
                inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    return inodes
