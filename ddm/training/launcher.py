"""Several processes of this machine that do one work: each is started here, told when to stop, and never outlives us.

A process is a fresh interpreter: it inherits nothing of this one but a pipe and an unnamed file with the tensors it is
handed, which all of them map, so that memory holds them once. They find each other through a file, and talk through
the loopback interface, with each other alone. No signal reaches them: this process passes a request to stop on to them.
A process that dies or hangs ends the others, and when this one dies, however it does, so do they.
"""

import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from ddm.errors import ArchipelagoError, SetupError, TrustError
from ddm.system.logs import follow_logging
from ddm.system.reaper import end_with_parent
from ddm.system.signals import blocked
from ddm.training.peer_check import strangers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ddm.io.images import Images

_POLL_S = 0.1
_PATIENCE_S = 30 * 60.0  # of one for its part from another, who may be writing a checkpoint of 50 GB or compiling
_GRACE_S = 2.0  # for the cause of an error to be heard, where what was heard first may be its consequence
_ALIGNED = 64
_OURS = (ArchipelagoError, OSError)  # which say by themselves what is wrong


@dataclass(frozen=True)
class Kind:
    """What processes do, in the words of errors.

    Attributes:
        name: of one of them.
        again: what running the command again does.
        fewer: what to lower where the machine is out of memory.
        talk: whether they form a process group of torch's; those that do not open no socket.
    """

    name: str
    again: str
    fewer: str
    talk: bool


TRAINING = Kind(
    "training process",
    "it goes on from the last checkpoint",
    "fewer training.processes in silo.toml, or more training.accumulate",
    talk=True,
)


class Work(Protocol):
    """What every process does. It is pickled, so a function of a module or a frozen dataclass with `__call__`."""

    def __call__(
        self, tensors: Mapping[str, "Images"], on_progress: Callable[[Any], None], should_stop: Callable[[], bool]
    ) -> None:
        """Do it; `KeyboardInterrupt` says that `should_stop` answered yes."""
        ...


def do_together(
    work: Work,
    tensors: Mapping[str, "Images"],
    num: int,
    *,
    folder: Path,
    on_progress: Callable[[Any], None],
    should_stop: Callable[[], bool],
    kind: Kind = TRAINING,
) -> None:
    """Do one work in several processes, with as many threads each as this one has, and wait for its end.

    Args:
        work: what each does, in one process group of torch's, as if `torchrun` had started it.
        tensors: what each is handed; nobody sees what another writes into them. Images that lie in files already are
            opened there by each.
        num: how many.
        folder: where the file with the tensors lies, which needs as much room as they.
        on_progress: called here with what a process reports; what it raises ends all of them.
        should_stop: asked here; its yes reaches every process.
        kind: what they are called, and whether they talk with each other.

    Raises:
        KeyboardInterrupt: `should_stop` said yes, and the processes have ended.
        ArchipelagoError: what a process raised; a `SetupError` where one died or did nothing for half an hour, a
            `TrustError` where somebody else came between them.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    # They are killed at their end, and clear nothing away by themselves.
    own = tempfile.TemporaryDirectory(prefix="archipelago-", ignore_cleanup_errors=True)
    with tempfile.TemporaryFile(dir=folder) as file, own as scratch:
        held = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        elsewhere = {name: value for name, value in tensors.items() if name not in held}
        places, threads = _write_tensors(held, file), torch.get_num_threads()
        task = _Task(work, places, elsewhere, threads, Path(scratch), _PATIENCE_S, kind)
        children = [_Child(task, file, rank, num) for rank in range(num)]
        try:
            for child in children:
                child.start()
            _watch(children, on_progress, should_stop)
        finally:
            for child in children:
                child.end()


@dataclass(frozen=True)
class _Place:
    """Where in the file a tensor lies."""

    dtype: "torch.dtype"
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Task:
    """What a process is sent through its pipe."""

    work: Work
    places: Mapping[str, _Place]
    elsewhere: Mapping[str, "Images"]
    threads: int
    scratch: Path
    patience_s: float
    kind: Kind


@dataclass(frozen=True)
class _Ended:
    """A process's last word, or that it had none."""

    error: BaseException | None = None
    died: bool = False


class _Child:
    """One of the processes, seen from here."""

    def __init__(self, task: _Task, file: IO[bytes], rank: int, num: int) -> None:
        self.name = _name(task.kind, rank, num)
        self._task = task
        self.pipe, self._theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_main, args=(self._theirs, _Inherited(file), rank, num), name=self.name
        )

    def start(self) -> None:
        """Start it, and send it what to do."""
        resource_tracker.ensure_running()  # else it starts with the process, and lets signals in again
        with blocked():
            self._process.start()
        self._theirs.close()
        self.send(self._task)

    def send(self, what: object) -> None:
        """Send it something; that a process has died shows when it is listened to."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(what)

    def receive(self) -> object:
        """Return what it says; its end, where it died without a word."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE_S)
            return _Ended(_death(self.name, self._process.exitcode, self._task.kind), died=True)

    def end(self) -> None:
        """End a process that has nothing left to do, before it could hear that nobody listens any more."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        self._theirs.close()
        self.pipe.close()


class _Inherited:
    """An open file, which arrives in a process that is being started as the number of its descriptor."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return _duplicate, (DupFd(self._file.fileno()),)


def _duplicate(handed: Any) -> int:
    return int(handed.detach())


def _watch(children: list[_Child], on_progress: Callable[[Any], None], should_stop: Callable[[], bool]) -> None:
    """Listen until all have ended, or the cause of one's failure is known."""
    running, ends = {child.pipe: child for child in children}, list[_Ended]()
    stopped, deadline = False, float("inf")
    while running and time.monotonic() < deadline:
        if not stopped and should_stop():
            stopped = True
            for child in running.values():
                child.send("stop")
        ready = wait(list(running), timeout=_POLL_S)
        for child in [child for pipe, child in running.items() if pipe in ready]:
            message = child.receive()
            if not isinstance(message, _Ended):
                on_progress(message)
                continue
            del running[child.pipe]
            ends.append(message)
            if not isinstance(message.error, KeyboardInterrupt | None):
                plain = message.died or isinstance(message.error, _OURS)
                deadline = min(deadline, time.monotonic() + (0.0 if plain else _GRACE_S))
    if error := _cause(ends):
        raise error


def _cause(ends: list[_Ended]) -> BaseException | None:
    """Return what ended the work: an error of ours, else a death, else what came first.

    That a neighbour has gone raises an error in the others, so such errors count only where nobody died.
    """
    errors = [end.error for end in ends if end.error is not None and not end.died]
    ours = [error for error in errors if isinstance(error, _OURS)]
    died = [end.error for end in ends if end.died]
    others = sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt))
    return next(iter([*ours, *died, *others]), None)


def _name(kind: Kind, rank: int, num: int) -> str:
    return f"{kind.name} {rank + 1} of {num}"


def _death(name: str, exitcode: int | None, kind: Kind) -> SetupError:
    how = signal.Signals(-exitcode).name if exitcode is not None and exitcode < 0 else f"exit code {exitcode}"
    return SetupError(
        name,
        expected="its answer",
        got=f"its end: {how}",
        remedy=f"Run the command again: {kind.again}. SIGKILL without anybody's doing is a machine out of memory: "
        f"{kind.fewer}.",
    )


def _write_tensors(tensors: Mapping[str, "Tensor"], file: IO[bytes]) -> dict[str, _Place]:
    """Write tensors into a file, and return where each lies."""
    import torch

    places = {}
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous()
        file.seek(-file.tell() % _ALIGNED, os.SEEK_CUR)
        places[name] = _Place(data.dtype, tuple(data.shape), file.tell())
        file.write(data.view(-1).view(torch.uint8).numpy().data)
    file.flush()
    return places


def _map_tensors(places: Mapping[str, _Place], descriptor: int) -> dict[str, "Tensor"]:
    """Map what `_write_tensors` wrote; what is written into it stays with this process."""
    import torch

    data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if places else None  # nothing maps an empty file
    os.close(descriptor)
    return {
        name: torch.frombuffer(
            data, dtype=place.dtype, count=torch.Size(place.shape).numel(), offset=place.offset
        ).reshape(place.shape)
        for name, place in places.items()
    }


def _main(pipe: Connection, descriptor: int, rank: int, num: int) -> None:
    """What a started process runs."""
    if parent := multiprocessing.parent_process():
        # The pipe tells of the parent's death too, but only a process that can listen, and a moment later.
        end_with_parent(parent.pid or 0)
    task: _Task = pipe.recv()
    stop = threading.Event()
    threading.Thread(target=_listen, args=(pipe, stop), daemon=True).start()
    os.environ |= _environment(rank, num, task.threads)
    follow_logging()
    tempfile.tempdir = str(task.scratch)
    error: BaseException | None = None
    try:
        _do(task, descriptor, rank, num, pipe.send, stop.is_set)
    except (*_OURS, KeyboardInterrupt) as caught:
        error = caught
    except BaseException:  # as text, because not every error can be sent
        error = RuntimeError(f"{_name(task.kind, rank, num)}:\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(_Ended(error))
    threading.Event().wait()  # for the parent, who ends this process


def _do(
    task: _Task, descriptor: int, rank: int, num: int, report: Callable[[Any], None], should_stop: Callable[[], bool]
) -> None:
    import torch

    torch.set_num_threads(task.threads)
    tensors = _map_tensors(task.places, descriptor)
    name = _name(task.kind, rank, num)
    if task.kind.talk:
        _join_group(task, rank, num, name)
    try:
        task.work({**tensors, **task.elsewhere}, report, should_stop)
    except RuntimeError as error:
        if "Timed out waiting" not in str(error):
            raise
        raise SetupError(
            name,
            expected=f"the other processes' part within {task.patience_s:.0f} s",
            got="no word from at least one of them",
            remedy=f"One of them hangs or was stopped. Run the command again: {task.kind.again}.",
        ) from error


def _join_group(task: _Task, rank: int, num: int, name: str) -> None:
    """Join torch's process group.

    Raises:
        SetupError: the others are not found.
        TrustError: somebody else's process was.
    """
    from torch import distributed

    patience = timedelta(seconds=task.patience_s)
    try:
        # As a store, because of a file's URL torch makes another path where that has a space or an umlaut.
        store = distributed.FileStore(str(task.scratch / "rendezvous"), num)  # type: ignore[attr-defined]
        store.set_timeout(patience)
        # Without a backend named, torch takes gloo for what lies on the CPU and NCCL for what lies on a GPU.
        distributed.init_process_group(store=store, rank=rank, world_size=num, timeout=patience)
        # Whose a connection is shows when it has been accepted, which torch waits for in one of the two alone.
        store.set(f"met/{rank}", "")
        store.wait([f"met/{each}" for each in range(num)])
    except RuntimeError as error:
        raise SetupError(
            name,
            expected="the other training processes at the loopback interface",
            got=str(error).splitlines()[0][-200:],
            remedy="Check that `ip address show lo` is up with 127.0.0.1, and that a service's rules allow AF_INET.",
        ) from error
    if strangers():
        raise TrustError(
            name,
            expected="connections with its own user's processes alone",
            got="a connection with a process of another user",
            remedy="Find out who connects to the ports of others on this machine; training.processes = 1 opens none.",
        )


def _listen(pipe: Connection, stop: threading.Event) -> None:
    """Hear the parent's word, and its end."""
    with closing(pipe), suppress(EOFError, OSError):
        while True:
            pipe.recv()
            stop.set()
    os._exit(1)


def _environment(rank: int, num: int, threads: int) -> dict[str, str]:
    """What torchrun would tell, and that nothing leaves this machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "OMP_NUM_THREADS": str(threads),  # else accelerate chooses one
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
