"""The attacks: another user of the machine, or a file that lies in a job's folder, runs code through a training job."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from pydantic import ValidationError

from ddm.errors import SetupError, TrustError, UnsafePathError
from ddm.io.files import link_or_copy
from ddm.io.locks import locked
from ddm.io.own_folder import make_own_folder, make_own_path
from ddm.system.peers import own_connections, tcp_sockets
from ddm.system.process_table import descendants
from ddm.system.processes import DetachedProgram, file_tail, spawn
from ddm.training.config import TrainingSettings
from ddm.training.job import Heartbeat, JobFolder, write_transient
from ddm.training.jobs import TrainingTask, train_job, write_job
from ddm.training.progress import Progress
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.jobs import SmallJob, small_task
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
STRANGER = 54321  # no process of this machine has it

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who listens"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]


@contextmanager
def stranger(folder: Path) -> Iterator[Path]:
    """Another user, who attacks each port that is opened; yield the file that a command of theirs would make."""
    marker = folder / "command-of-the-stranger"
    command = [sys.executable, "-m", "tests.support.job_stranger", str(STRANGER), str(marker)]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield marker
            assert process.poll() is None, "the stranger failed by itself"
        finally:
            process.kill()


# Starts two processes of a job: python, the job's folder, the name of the start.
START_TWO = """
for rank in 0 1; do
  RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "$1" -P -m ddm.training "$2" --launch "$3" &
done
wait
"""
TORCHRUN = (
    *("{python}", "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
    *("--nproc-per-node={processes}", "-m", "ddm.training", "{folder}", "--launch", "{launch}"),
)


def with_launcher(*words: str) -> TrainingSettings:
    """Two processes that a command starts."""
    return TrainingSettings(device="cpu", processes=2, launcher=words)


def script(folder: Path, text: str) -> str:
    """Write a script of the operator's, and return its path."""
    path = folder / "start.sh"
    path.write_text(text)
    return str(path)


def short_task() -> TrainingTask:
    return small_task(num_steps=10)


def test_torchrun_is_refused_before_a_stranger_runs_commands_through_its_store(
    tmp_path: Path,
) -> None:
    """Without the refusal, the stranger's command runs within seconds."""
    with (
        stranger(tmp_path) as marker,
        pytest.raises(ValidationError, match="torchrun runs the commands of whoever"),
    ):
        SmallJob(tmp_path, with_launcher(*TORCHRUN), short_task())()
    assert not marker.exists()


@pytest.mark.slow
def test_torchrun_in_a_script_is_refused_by_the_processes_that_it_starts(tmp_path: Path) -> None:
    words = " ".join(TORCHRUN).format(python='"$1"', processes=2, folder='"$2"', launch='"$3"')
    settings = with_launcher("bash", script(tmp_path, words), "{python}", "{folder}", "{launch}")
    with pytest.raises(TrustError, check=has_subject("torchrun")):
        SmallJob(tmp_path, settings, short_task())()


def listening_ends(pids: Iterable[int]) -> set[str]:
    """The addresses and ports, as the kernel writes them, at which some processes listen."""
    sockets = set[str]()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(str(descriptor.readlink()))
    return {
        end.local for end in tcp_sockets() if end.listening and f"socket:[{end.inode}]" in sockets
    }


def process_of_rank(rank: int) -> int | None:
    """The process of a job that this test started which has a rank."""
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"ddm.training" in words and f"RANK={rank}".encode() in environment:
                return pid
    return None


def is_connected_with_stranger(pid: int) -> bool:
    """Whether the other user has a connection with a port of a process."""
    ends = listening_ends([pid])
    return any(end.remote in ends and end.user == STRANGER for end in tcp_sockets())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["local", "command"])
def test_other_user_who_connects_in_a_process_s_place_is_refused(
    tmp_path: Path, start: str
) -> None:
    settings = TrainingSettings(device="cpu", processes=2)
    if start == "command":
        words = ("bash", script(tmp_path, START_TWO), "{python}", "{folder}", "{launch}")
        settings = with_launcher(*words)

    def let_stranger_be_first() -> None:
        """Halt the second process, which imports torch, until the stranger has its place."""
        wait_until(lambda: process_of_rank(1) is not None, "the second process")
        second = process_of_rank(1)
        assert second is not None
        os.kill(second, signal.SIGSTOP)
        first = process_of_rank(0)
        assert first is not None
        wait_until(lambda: is_connected_with_stranger(first), "the stranger's connection")
        os.kill(second, signal.SIGCONT)

    with stranger(tmp_path) as marker:
        thread = threading.Thread(target=let_stranger_be_first)
        thread.start()
        try:
            with pytest.raises(TrustError, match="connections with the other processes of this"):
                SmallJob(tmp_path, settings, short_task())()
        finally:
            thread.join()
    assert not marker.exists()
    assert not (tmp_path / "job" / "result.json").exists()


def test_one_process_opens_no_port(tmp_path: Path) -> None:
    before = own_connections()
    trial = SmallJob(tmp_path, task=short_task())
    addresses = set[str]()
    trial(lambda progress: addresses.update(listening_ends([os.getpid()])))
    assert trial.progress and not addresses
    assert own_connections() == before


@pytest.mark.slow
def test_address_in_the_environment_leads_a_job_nowhere_and_it_listens_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the store of torch's that the variables name, the first process would listen on all addresses."""
    words = ("bash", script(tmp_path, START_TWO), "{python}", "{folder}", "{launch}")
    # It ends once its ports were seen.
    long_task = small_task(num_steps=100_000)
    trial = SmallJob(tmp_path, with_launcher(*words), long_task)
    addresses = set[str]()

    def note_ports(progress: Progress) -> None:
        ends = listening_ends(descendants(os.getpid()))
        addresses.update(end.partition(":")[0] for end in ends)
        if addresses:
            trial.stop.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        with pytest.raises(KeyboardInterrupt):
            trial(note_ports)
        listener.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert addresses == {"0100007F"}


def folders_of_others(root: Path) -> Iterator[tuple[str, Path]]:
    """Places for a job into which another user could put something."""
    made_by_stranger = root / "made"
    made_by_stranger.mkdir()
    os.chown(made_by_stranger, STRANGER, STRANGER)
    yield "another user's folder", made_by_stranger
    yield "a folder below another user's", made_by_stranger / "north" / "job"

    open_to_all = root / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    yield "a folder that everybody writes in", open_to_all
    yield "a folder below one that everybody writes in", open_to_all / "job"

    open_to_group = root / "group"
    open_to_group.mkdir()
    os.chown(open_to_group, -1, STRANGER)
    open_to_group.chmod(0o770)
    yield "a folder below one that a group writes in", open_to_group / "job"

    sticky = root / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "made").mkdir()
    os.chown(sticky / "made", STRANGER, STRANGER)
    yield "another user's folder in one like /tmp", sticky / "made"
    (sticky / "link").symlink_to(root / "victim")
    os.chown(sticky / "link", STRANGER, STRANGER, follow_symlinks=False)
    yield "another user's link in one like /tmp", sticky / "link"
    yield "a folder below such a link", sticky / "link" / "job"


def test_job_is_not_written_where_another_user_could_put_something(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    task = short_task()
    settings = TrainingSettings(device="cpu", launcher=("srun", "{folder}"), jobs=tmp_path)
    for place, folder in folders_of_others(tmp_path):
        with case(place=place):
            with pytest.raises(UnsafePathError, check=has_subject(str(folder))):
                train_job(
                    task,
                    JobFolder(folder),
                    settings,
                    tmp_path / "expert.safetensors",
                    on_progress=lambda progress: None,
                    should_stop=lambda: False,
                )
            assert not folder.is_dir() or not list(folder.iterdir())
    assert not list(victim.iterdir()), "nothing was made where a stranger's link leads"


def test_job_is_written_in_a_folder_of_ones_own_below_one_like_tmp(tmp_path: Path) -> None:
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    own_link = tmp_path / "link"
    own_link.symlink_to("sticky")
    make_own_path(own_link / "mine" / "job")
    for path in (sticky / "mine", sticky / "mine" / "job"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def run_process(folder: Path, *options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run one process of a job, as a scheduler would on another machine."""
    command = [sys.executable, *options, "-m", "ddm.training", str(folder), "--launch", "one"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_process_believes_no_folder_of_another_user(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job")
    make_own_folder(folder.path)
    write_job(short_task(), folder, with_launcher("srun", "{folder}"))
    os.chown(folder.path, STRANGER, STRANGER)
    before = sorted(folder.path.iterdir())
    result = run_process(folder.path, "-P", cwd=Path("/"))
    assert result.returncode == UnsafePathError.exit_code, result.stderr
    assert f"a folder of user {STRANGER}" in result.stderr
    assert sorted(folder.path.iterdir()) == before


def plant_modules(folder: Path, marker: Path) -> None:
    """Put modules there that Python or a job imports."""
    folder.mkdir(exist_ok=True)
    for name in ("argparse", "json", "torch", "numpy", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")


def test_module_in_the_job_s_folder_is_not_imported(tmp_path: Path) -> None:
    """Also by a command that starts Python as it should not, without the variable that it inherits."""
    marker = tmp_path / "ran"
    trial = SmallJob(tmp_path, with_launcher("x", "{folder}"), short_task())
    plant_modules(trial.folder.path, marker)
    unset = ("env", "-u", "PYTHONSAFEPATH")
    for words in (("{python}",), (*unset, "{python}"), (*unset, "{python}", "-P")):
        with case(words=words):
            start = (*words, "-m", "ddm.training", "{folder}", "--launch", "{launch}")
            trial.settings = with_launcher(*start)
            # One process trains, where the job requires two.
            with pytest.raises(SetupError, check=has_subject("training.")):
                trial()
            assert not marker.exists()


def test_process_that_searches_its_working_folder_for_modules_is_refused(tmp_path: Path) -> None:
    result = run_process(tmp_path / "job", cwd=tmp_path)
    assert result.returncode == 2 and "python -P -m ddm.training" in result.stderr


def test_link_in_a_job_s_folder_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    run = JobFolder(tmp_path / "job").run("one")
    run.path.mkdir(parents=True)
    source = tmp_path / "source"
    source.write_bytes(b"other")

    def plant(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(victim)

    plant(run.heartbeat)
    plant(run.heartbeat.with_name(".heartbeat.json.new"))
    plant(run.heartbeat.with_name(f".heartbeat.json.{threading.get_native_id()}.part"))
    write_transient(Heartbeat(count=1), run.heartbeat)
    assert not run.heartbeat.is_symlink()
    plant(run.stop)
    run.request_stop()
    assert not run.stop.is_symlink()
    plant(run.path / "copy")
    with patch.object(os, "link", side_effect=OSError):
        link_or_copy(source, run.path / "copy")
    assert (run.path / "copy").read_bytes() == b"other"
    plant(run.command_log)
    with pytest.raises(OSError, match="symbolic links"):
        DetachedProgram.start(["/bin/echo", "x"], log_path=run.command_log, env={}, cwd=Path("/"))
    assert file_tail(run.command_log) == ""
    child = spawn(["/bin/echo", "x"], log_path=run.command_log)
    wait_until(lambda: not child.running(), "the end of the guard")
    plant(run.path / ".training.lock")
    with pytest.raises(OSError, match="symbolic links"), locked(run.path, "training"):
        pass
    assert victim.read_bytes() == b"kept"
