import hashlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.errors import MissingFileError
from ddm.system.guard import RotatingLog
from ddm.system.process_table import descendants, processor_use
from ddm.system.processes import (
    free_port,
    port_in_use,
    program,
    script_command,
    spawn,
)
from tests.support.processes import is_running
from tests.support.waiting import wait_until

# A program whose child ignores SIGTERM in a session of its own: the hardest tree to end.
TREE = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
time.sleep(600)
"""
# The same, but when told to end only its main thread does: the kernel then shows it as a zombie, while it lives on.
HALF_ENDED = f"""
import ctypes, signal, threading, time
threading.Thread(target=time.sleep, args=[600]).start()
signal.signal(signal.SIGTERM, lambda *_: ctypes.CDLL(None).pthread_exit(None))
{TREE}
"""
SUPERVISOR = """
import sys, time
from pathlib import Path
from ddm.system.processes import spawn
child = spawn([sys.executable, "-c", sys.argv[1]], log_path=Path(sys.argv[2]), grace_s=0.2)
print(child.pid, child.guard_pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path):
    child = spawn([sys.executable, "-c", TREE], log_path=tmp_path / "log", grace_s=0.2)
    wait_until(lambda: "up" in child.log_tail())
    yield child
    child.kill()


def test_tree_is_gone_when_terminated_although_a_grandchild_ignores_sigterm(tree):
    pids = [tree.guard_pid, *descendants(tree.guard_pid)]
    assert len(pids) == 3 and tree.num_descendants() == 1
    tree.terminate()
    assert not any(map(is_running, pids)) and not tree.running()


def test_tree_is_gone_when_only_the_main_thread_of_its_program_ends(tmp_path):
    tree = spawn([sys.executable, "-c", HALF_ENDED], log_path=tmp_path / "log", grace_s=0.2)
    wait_until(lambda: "up" in tree.log_tail())
    pids = [tree.guard_pid, *descendants(tree.guard_pid)]
    assert len(pids) == 3
    tree.terminate()
    assert not any(map(is_running, pids)) and not tree.running()


def test_tree_is_gone_when_its_program_is_killed(tree):
    pids = descendants(tree.guard_pid)
    os.kill(tree.pid, signal.SIGKILL)
    assert tree.wait(60.0) and tree.returncode == 137
    assert not any(map(is_running, pids))


def test_program_is_gone_when_its_guard_is_killed(tree):
    os.kill(tree.guard_pid, signal.SIGKILL)
    wait_until(lambda: not is_running(tree.pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_tree_is_gone_when_its_supervisor_is_killed(tmp_path, number):
    log = tmp_path / "log"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, TREE, str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with supervisor:
        guard_pid = int(supervisor.stdout.readline().split()[1])
        wait_until(lambda: log.exists() and "up" in log.read_text())
        pids = [guard_pid, *descendants(guard_pid)]
        assert len(pids) == 3
        supervisor.send_signal(number)
    wait_until(lambda: not any(map(is_running, pids)))


def test_child_reports_the_exit_code_and_output_when_its_program_ends(tmp_path):
    child = spawn(
        [sys.executable, "-c", "print('bye'); raise SystemExit(7)"], log_path=tmp_path / "log"
    )
    assert child.wait(60.0) and child.returncode == 7
    assert child.log_tail() == "bye\n"


def test_child_ends_with_127_when_its_program_does_not_exist(tmp_path):
    child = spawn([str(tmp_path / "nothing")], log_path=tmp_path / "log")
    assert child.wait(60.0) and child.returncode == 127
    assert "cannot start" in child.log_tail()


def test_script_ends_when_its_main_thread_ends_although_a_thread_lives_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print(sys.argv[1], flush=True)\nsys.exit(3)\n"
    )
    command = [*script_command("python")[:-1], str(script), "hello"]
    child = spawn(command, log_path=tmp_path / "log")
    assert child.wait(60.0) and child.returncode == 3
    assert child.log_tail() == "hello\n"


def test_log_stays_below_twice_its_limit_when_much_is_written(tmp_path):
    log = RotatingLog(tmp_path / "log", 1000)
    for number in range(100):
        log.write(b"%099d\n" % number)
    assert (tmp_path / "log").read_bytes().endswith(b"99\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000


def test_port_is_reported_in_use_when_something_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_in_use("127.0.0.1", port)
    assert not port_in_use("127.0.0.1", free_port())


def test_program_is_refused_when_it_is_not_installed():
    with pytest.raises(MissingFileError):
        program("flower-superduper")


def test_secret_reaches_the_program_and_no_place_where_others_look(tmp_path):
    secret = b"correct horse\0battery"
    code = (
        "import hashlib, sys, time; data = sys.stdin.buffer.read();"
        "print(hashlib.sha256(data).hexdigest(), flush=True); time.sleep(600)"
    )
    child = spawn([sys.executable, "-c", code], log_path=tmp_path / "log", input_bytes=secret)
    try:
        wait_until(lambda: child.log_tail().endswith("\n"))
        assert child.log_tail().strip() == hashlib.sha256(secret).hexdigest()
        for pid in (child.pid, child.guard_pid):
            for name in ("cmdline", "environ"):
                assert b"horse" not in Path(f"/proc/{pid}/{name}").read_bytes()
    finally:
        child.kill()


def test_process_that_sleeps_wants_no_processor_and_one_that_computes_has_had_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as asleep:
        wait_until(lambda: not processor_use(asleep.pid)[0])
        asleep.kill()
    assert processor_use(asleep.pid) == (False, 0.0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as awake:
        wait_until(lambda: processor_use(awake.pid)[1] > 0.2)
        assert processor_use(awake.pid)[0]
        awake.kill()
