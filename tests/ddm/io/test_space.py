"""Folders that cannot be written and disks with too little room: found before the work, and told in bytes."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddm.errors import DiskError
from ddm.io.space import check_writable, free_bytes, require_free_space
from tests.support.errors import has_subject

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    finished = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=False
    )
    if finished.returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_needed_and_free_bytes_are_told_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddm.io.space.free_bytes", lambda folder: 1000)
    require_free_space({tmp_path: 1000}, "plan digits")
    with pytest.raises(DiskError) as refusal:
        require_free_space({tmp_path: 1001}, "plan digits")
    expected = "expected at least 1001 bytes free on the disk for plan digits, got 1000 bytes free"
    assert str(refusal.value) == f"{tmp_path}: {expected}"


def test_folders_of_one_disk_share_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddm.io.space.free_bytes", lambda folder: 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(DiskError, match="1200 bytes free on the disk"):
        require_free_space({tmp_path / "a": 600, tmp_path / "b": 600}, "a test")


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_folder_that_refuses_a_small_file_is_named(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What permissions do not tell: the write itself, or making it durable, fails."""
    (tmp_path / "fine").mkdir()
    (tmp_path / "bad").mkdir()
    check_writable([tmp_path / "fine", tmp_path / "bad"])
    sync = os.fsync

    def failing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == "bad":
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(DiskError, match=os.strerror(code)) as refusal:
        check_writable([tmp_path / "fine", tmp_path / "bad"])
    assert refusal.value.subject == str(tmp_path / "bad")
    # Permissions are no remedy for a full disk.
    is_full = code in (errno.ENOSPC, errno.EDQUOT)
    assert ("Free space" in refusal.value.remedy) == is_full
    assert ("chmod" in refusal.value.remedy) != is_full
    assert not list(tmp_path.glob("*/.*")), "nothing is left"


def test_trial_leaves_nothing_where_the_file_system_knows_no_nameless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def named_only(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", named_only)
    check_writable([tmp_path])
    assert not list(tmp_path.iterdir())


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, check=has_subject("absent")):
        check_writable([tmp_path / "absent"])


@pytest.mark.slow
@root_only
def test_disk_that_is_full_or_read_only_is_found(small_disk: Path) -> None:
    check_writable([small_disk])
    assert free_bytes(small_disk) <= 1 << 20
    with pytest.raises(DiskError):
        require_free_space({small_disk: 2 << 20}, "a test")
    (small_disk / "ballast").write_bytes(bytes(free_bytes(small_disk)))
    with pytest.raises(DiskError, match="No space left"):
        check_writable([small_disk])
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(DiskError, match="Read-only"):
        check_writable([small_disk])
