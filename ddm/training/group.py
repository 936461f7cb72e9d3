"""How the processes of one training find each other, whoever started them.

torchrun, Kubernetes' operators and `silo run` say in the environment which process this is; srun and mpirun say it in
words of their own. Where nobody names a meeting point (`MASTER_ADDR`), it is a file in the job's folder, which all of
them see, and nothing listens for it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ddm.errors import SetupError, TrustError
from ddm.training.peer_check import has_foreign_peers

# of one for its part from another, who may be writing a checkpoint of 50 GB or compiling
PATIENCE_S = 30 * 60.0
# Of the process, of all, of those on its machine. Slurm tells a batch script, too, which task of a step it would be.
_WORDS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_ATTEMPT = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


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
        """What an error calls it."""
        return process_name(self.rank, self.num)


def process_name(rank: int, num: int) -> str:
    """Return what an error calls a process."""
    return f"training process {rank + 1} of {num}"


def member_of(environment: Mapping[str, str]) -> Member:
    """Return which process this is, by the words of whoever started it; the only one where nobody says.

    Raises:
        SetupError: the words contradict each other.
    """
    for rank_name, num_name, local_name in _WORDS:
        if rank_name not in environment or num_name not in environment:
            continue
        try:
            rank, num = int(environment[rank_name]), int(environment[num_name])
            local_rank = int(environment.get(local_name, "0"))
        except ValueError:
            rank, num, local_rank = -1, 0, 0
        if not 0 <= rank < num or not 0 <= local_rank < num:
            raise SetupError(
                f"{rank_name} and {num_name}",
                expected="the number of this process, from 0, and how many there are",
                got="other values in the environment",
                remedy="Start the processes with torchrun or srun, which set both.",
            )
        alone = (
            environment.get("LOCAL_WORLD_SIZE") == str(num)
            or environment.get("SLURM_STEP_NUM_NODES") == "1"
        )
        attempt = "-".join(environment.get(name, "") for name in _ATTEMPT)
        return Member(rank, num, local_rank, alone or num == 1, attempt)
    return Member(0, 1, 0, on_one_machine=True)


def torch_environment(member: Member, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what accelerate and torch read, in the words of torchrun."""
    import torch

    # A scheduler may show each process its own GPU alone, which then is the first that it sees.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_rank = member.local_rank % gpus if gpus else member.local_rank
    told = {"RANK": str(member.rank), "WORLD_SIZE": str(member.num), "LOCAL_RANK": str(local_rank)}
    if "MASTER_ADDR" not in environment:
        # Else accelerate asks for the meeting point of processes on several machines, which have met already.
        told["LOCAL_WORLD_SIZE"] = str(member.num)
    return told | {
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    }


def join_group(member: Member, folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Join torch's process group.

    Args:
        member: this process.
        folder: of this start of the job, where its processes meet unless the environment names a place.
        patience_s: how long each waits for another.

    Raises:
        SetupError: the others are not found.
        TrustError: somebody else's process was.
    """
    from torch import distributed

    patience = timedelta(seconds=patience_s)
    try:
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            distributed.init_process_group(timeout=patience)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # As a store, because of a file's URL torch makes another path where that has a space or an umlaut.
            path = str(folder / f"rendezvous{member.attempt}")
            store = distributed.FileStore(path, member.num)  # type: ignore[attr-defined]
            store.set_timeout(patience)
            # Without a backend named, torch takes gloo for what lies on the CPU and NCCL for what lies on a GPU.
            distributed.init_process_group(
                store=store, rank=member.rank, world_size=member.num, timeout=patience
            )
            # Whose a connection is shows when it has been accepted, which torch waits for in one of the two alone.
            store.set(f"met/{member.rank}", "")
            store.wait([f"met/{each}" for each in range(member.num)])
    except RuntimeError as error:
        raise SetupError(
            member.name,
            expected="the other processes of this training",
            got=str(error).splitlines()[0][-200:],
            remedy="On one machine, check that `ip address show lo` is up with 127.0.0.1, and that a service's rules "
            "allow AF_INET; on several, name the network between them in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        ) from error
    if member.on_one_machine and "MASTER_ADDR" not in os.environ and has_foreign_peers():
        raise TrustError(
            member.name,
            expected="connections with its own user's processes alone",
            got="a connection with a process of another user",
            remedy="Find out who connects to the ports of others on this machine; training.processes = 1 opens none.",
        )
