"""Copies of a folder that somebody else filled: bounded, nobody else's, and sparse where it was."""

import errno
import os
from pathlib import Path

import pytest

from ddm.errors import FormatError, UnsafePathError
from ddm.io.copying import copy_documents, copy_tree_bounded


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
    monkeypatch.setattr("ddm.io.copying.list_files", lambda folder, max_entries: {"a": swapped})
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
def test_copy_keeps_bytes_and_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool
) -> None:
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


def test_copy_stops_when_a_file_becomes_shorter_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"x" * 100)
    copy_range = os.copy_file_range

    def shorten(*arguments: int) -> int:
        os.truncate(tmp_path / "in" / "a", 0)
        return copy_range(*arguments)

    monkeypatch.setattr(os, "copy_file_range", shorten)
    with pytest.raises(FormatError):
        copy_tree_bounded(tmp_path / "in", tmp_path / "out", max_bytes=100)


def test_copy_of_documents_ends_at_the_first_that_fails_with_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    (source / "below").mkdir(parents=True)
    names = ("a", "below/b", "c")
    for name in names:
        (source / name).write_bytes(name.encode())
    copy_documents(source, target)
    contents = {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file()
    }
    assert contents == {name: name.encode() for name in names}

    def full(path: Path, data: bytes) -> None:
        if path.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.write_bytes(data)

    monkeypatch.setattr("ddm.io.copying.write_atomic", full)
    with pytest.raises(OSError) as caught:
        copy_documents(source, tmp_path / "full")
    assert (caught.value.errno, caught.value.filename) == (
        errno.ENOSPC,
        str(tmp_path / "full" / "below" / "b"),
    )
    assert not (tmp_path / "full" / "c").exists()
