"""Locks between processes."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddm.errors import BusyError
from ddm.io.locks import is_locked, lock_file, locked


def test_lock_refuses_a_second_holder_and_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ddm.io.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'worker'): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert is_locked(tmp_path, "worker") and not is_locked(tmp_path, "courier")
    with pytest.raises(BusyError), locked(tmp_path, "worker"):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path, "worker"):
        pass


def test_error_under_a_lock_is_not_taken_for_a_lock_held_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), locked(tmp_path, "worker"):
        raise BlockingIOError


def test_lock_that_waits_is_had_when_the_other_lets_it_go(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with lock_file(tmp_path / "lock"):
            order.append("second")

    with lock_file(tmp_path / "lock"):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
