"""Files of our own: written whole or not at all, and read with a bound."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.errors import FormatError, MissingFileError, UnsafePathError
from ddm.io.files import move_into_place, read_bounded, replacing, staging_folder, write_atomic


def test_write_atomic_leaves_the_old_file_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old")
    # A file size limit fails a write as a full disk does, in a process of its own.
    code = (
        "import resource, signal, sys; from pathlib import Path; from ddm.io.files import write_atomic;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "write_atomic(Path(sys.argv[1]), b'x' * 5000)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert "OSError" in finished.stderr
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_file_that_must_not_be_overwritten_is_not(tmp_path: Path) -> None:
    write_atomic(tmp_path / "key", b"first", mode=0o600, overwrite=False)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "key", b"second", mode=0o600, overwrite=False)
    assert (tmp_path / "key").read_bytes() == b"first"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("link_kind", ["file", "link"])
def test_what_lies_where_a_file_is_written_aside_is_never_written_into(
    tmp_path: Path, link_kind: str
) -> None:
    """The attack: a file or link made there before would tell its maker what is secret, or lead the bytes elsewhere."""
    with replacing(tmp_path / "key"):
        (part,) = tmp_path.iterdir()
    other = tmp_path / "other"
    other.write_bytes(b"")
    os.link(other, part) if link_kind == "file" else part.symlink_to(other)
    write_atomic(tmp_path / "key", b"secret", mode=0o600)
    assert (tmp_path / "key").read_bytes() == b"secret" and other.read_bytes() == b""
    assert stat.S_IMODE((tmp_path / "key").lstat().st_mode) == 0o600


def test_streamed_file_is_there_when_it_was_written_to_its_end_and_not_before(
    tmp_path: Path,
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "f") as handle:
        handle.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "f").read_bytes() == b"old"
    with replacing(tmp_path / "f") as handle:
        handle.write(b"new")
        assert (tmp_path / "f").read_bytes() == b"old"
    assert (tmp_path / "f").read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_folder_built_aside_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "made" / "release"
    with pytest.raises(ZeroDivisionError), staging_folder(target) as part:
        (part / "half").write_bytes(b"")
        raise ZeroDivisionError
    assert list(target.parent.iterdir()) == []
    part.mkdir()
    (part / "left by a crash").touch()
    with staging_folder(target) as part:
        write_atomic(part / "deep" / "f", b"x")
        assert not target.exists()
        move_into_place(part, target)
    assert [path.relative_to(target).as_posix() for path in sorted(target.rglob("*"))] == [
        "deep",
        "deep/f",
    ]
    assert list(target.parent.iterdir()) == [target]


def test_folder_takes_the_place_of_no_other(tmp_path: Path) -> None:
    write_atomic(tmp_path / "target" / "f", b"first")
    with pytest.raises(OSError, match="not empty"), staging_folder(tmp_path / "target") as part:
        write_atomic(part / "f", b"second")
        move_into_place(part, tmp_path / "target")
    assert (tmp_path / "target" / "f").read_bytes() == b"first"


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
