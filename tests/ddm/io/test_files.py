"""Files on disk: whole or not at all, bounded, no links, one process at a time."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddm.errors import BusyError, FormatError, MissingFileError, UnsafePathError
from ddm.io.files import copy_tree_bounded, list_files, locked, read_bounded, write_atomic


def test_write_atomic_leaves_the_old_file_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old")
    # A file size limit fails a write as a full disk does, in a process of its own.
    code = (
        "import resource, signal, sys; from pathlib import Path; from ddm.io.files import write_atomic;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "write_atomic(Path(sys.argv[1]), b'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_read_bounded_refuses_a_longer_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_bounded(tmp_path / "f", 5) == b"12345"
    with pytest.raises(FormatError):
        read_bounded(tmp_path / "f", 4)


def test_read_bounded_refuses_links_folders_pipes_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(UnsafePathError):
            read_bounded(tmp_path / name, 10)
    with pytest.raises(MissingFileError):
        read_bounded(tmp_path / "none", 10)


def test_list_files_refuses_a_symbolic_link_however_deep(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").write_bytes(b"x")
    assert set(list_files(tmp_path)) == {"a/f"}
    (tmp_path / "a" / "b" / "link").symlink_to("/etc")
    with pytest.raises(UnsafePathError):
        list_files(tmp_path)


def test_list_files_stops_at_its_bound_however_much_a_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a folder of more entries than fit into memory."""
    for number in range(50):
        (tmp_path / f"{number}").mkdir()
    seen = []
    scandir = os.scandir

    @contextmanager
    def counted(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            yield (seen.append(entry) or entry for entry in entries)  # type: ignore[func-returns-value]

    monkeypatch.setattr(os, "scandir", counted)
    with pytest.raises(UnsafePathError):
        list_files(tmp_path, most=3)
    assert len(seen) == 4
    assert list_files(tmp_path, most=50) == {}


def test_list_files_refuses_a_folder_that_is_a_link_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("link", "dangling", "none"):
        with pytest.raises(UnsafePathError):
            list_files(tmp_path / name)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_copy_tree_refuses_a_file_that_became_something_else_after_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The attack: a named pipe would hang the copy, a link would lead it elsewhere."""
    (tmp_path / "in").mkdir()
    swapped = tmp_path / "in" / "a"
    if kind == "pipe":
        os.mkfifo(swapped)
    else:
        swapped.symlink_to("/etc/hostname")
    monkeypatch.setattr("ddm.io.files.list_files", lambda folder, most: {"a": swapped})
    with pytest.raises(UnsafePathError):
        copy_tree_bounded(tmp_path / "in", tmp_path / "out", max_bytes=100)
    assert list((tmp_path / "out").iterdir()) == []


def test_copy_tree_stops_at_its_bound(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"x" * 100)
    copy_tree_bounded(tmp_path / "in", tmp_path / "fits", max_bytes=100)
    assert (tmp_path / "fits" / "a").read_bytes() == b"x" * 100
    with pytest.raises(FormatError):
        copy_tree_bounded(tmp_path / "in", tmp_path / "too-much", max_bytes=99)


def test_copy_is_nobody_elses_when_the_writer_keeps_its_file_open(tmp_path: Path) -> None:
    """The attack: what was verified is changed afterwards through a file that was opened before."""
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a").open("wb", buffering=0) as writer:
        writer.write(b"good")
        copy_tree_bounded(tmp_path / "in", tmp_path / "out", max_bytes=100)
        writer.seek(0)
        writer.write(b"evil")
    assert (tmp_path / "out" / "a").read_bytes() == b"good"
    assert (tmp_path / "in" / "a").read_bytes() == b"evil"


@pytest.mark.parametrize("in_kernel", [True, False])
def test_copy_keeps_bytes_and_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool) -> None:
    """A file system that cannot copy in the kernel, or two of them, cost time and nothing else."""
    (tmp_path / "in").mkdir()
    for name, at in (("begin", 0), ("middle", 5 * 2**20), ("end", 8 * 2**20 - 3)):
        with (tmp_path / "in" / name).open("wb") as handle:
            handle.truncate(8 * 2**20)
            handle.seek(at)
            handle.write(b"abc")
    (tmp_path / "in" / "hole").touch()
    os.truncate(tmp_path / "in" / "hole", 12 * 2**30)
    (tmp_path / "in" / "empty").touch()

    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "other file system")

    if not in_kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    copy_tree_bounded(tmp_path / "in", tmp_path / "out", max_bytes=2**34)
    for name in ("begin", "middle", "end", "empty"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    hole = (tmp_path / "out" / "hole").stat()
    assert hole.st_size == 12 * 2**30 and hole.st_blocks == 0


def test_copy_stops_when_a_file_becomes_shorter_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"x" * 100)
    copy_range = os.copy_file_range

    def shorten(*arguments: int) -> int:
        os.truncate(tmp_path / "in" / "a", 0)
        return copy_range(*arguments)

    monkeypatch.setattr(os, "copy_file_range", shorten)
    with pytest.raises(FormatError):
        copy_tree_bounded(tmp_path / "in", tmp_path / "out", max_bytes=100)


def test_lock_refuses_a_second_holder_and_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ddm.io.files import locked\n"
        "with locked(Path(sys.argv[1]), 'worker'): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(BusyError), locked(tmp_path, "worker"):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path, "worker"):
        pass
