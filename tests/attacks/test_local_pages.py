"""The attack: another local user holds connections to a real page or fills its queue, or wants its memory."""

import resource
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ddm.pages.test_connections import needs_linux, needs_root, stranger_holds
from tests.silo.images.test_review import scanned, served


@needs_linux
@needs_root
def test_images_can_be_reviewed_while_another_user_holds_connections(tmp_path: Path) -> None:
    with served(scanned(tmp_path)) as page:
        port = int(page.origin.rpartition(":")[2])
        with stranger_holds(port):
            assert {page.ask("GET", page.path)[0] for _ in range(20)} == {200}


NUM_WAITING = 200


@needs_linux
def test_few_connections_wait_before_the_one_of_the_page_s_user(tmp_path: Path) -> None:
    """Whoever opens and closes connections without end fills the queue, and each request waits behind all in it.

    With a queue of 2,048 connections a request took 15 seconds on a busy machine.
    """
    with served(scanned(tmp_path)) as page, ExitStack() as stack:
        port = int(page.origin.rpartition(":")[2])
        # Once it answers, its queue is its own. Then it is at something else.
        assert page.ask("GET", page.path)[0] == 200
        page.process.send_signal(signal.SIGSTOP)
        waiting = [stack.enter_context(socket.socket()) for _ in range(NUM_WAITING)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        # Those for which there is a place are connected at once; the kernel tries the others again after a second.
        _, connected, _ = select.select([], waiting, [], 0.5)
        page.process.send_signal(signal.SIGCONT)
        assert 0 < len(connected) < NUM_WAITING / 2
        for connection in waiting:
            connection.close()
        assert page.ask("GET", page.path)[0] == 200


def num_cores(folder: Path) -> int:
    return len(list(folder.glob("core*")))


@needs_linux
def test_crash_of_a_process_that_holds_images_leaves_no_core_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/sys/kernel/core_pattern").read_text().startswith("core"):
        pytest.skip("this machine puts core dumps elsewhere")
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    if limits[1] in (0, 1):
        pytest.skip("this process may write no core dumps, which is the control")
    made = scanned(tmp_path / "site")
    (tmp_path / "cores").mkdir()
    monkeypatch.chdir(tmp_path / "cores")
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    try:
        crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        subprocess.run([sys.executable, "-c", crash], check=False)
        assert num_cores(tmp_path / "cores") == 1, "control"
        with served(made) as page:
            page.process.send_signal(signal.SIGSEGV)
            assert page.process.wait() == -signal.SIGSEGV
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert num_cores(tmp_path / "cores") == 1


HOLD = """
import ctypes, os, sys
from ddm.system.secrecy import forbid_core_dumps
os.setgroups([])
os.setgid({user})
os.setuid({user})
# As after the start of a program by that user: the change of user alone closes the memory.
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if sys.argv[1] == "closed":
    forbid_core_dumps()
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


@needs_linux
@needs_root
@pytest.mark.parametrize("state", ["open", "closed"])
def test_memory_is_closed_to_other_processes_of_the_same_user(state: str) -> None:
    user = 54321
    program = HOLD.format(user=user)
    look = (
        f"import os, sys; os.setgroups([]); os.setgid({user}); os.setuid({user}); open(sys.argv[1])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            assert process.stdout is not None
            path = f"/proc/{process.stdout.readline().strip()}/environ"
            finished = subprocess.run(
                [sys.executable, "-c", look, path], capture_output=True, text=True, check=False
            )
        finally:
            process.kill()
    # The open one is the control: without the protection, the same user's processes read everything.
    assert ("PermissionError" in finished.stderr) == (state == "closed"), finished.stderr
