"""The walk through a folder that somebody else filled, and the opening of a file in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddm.errors import AbsentFileError, UnsafePathError
from ddm.io.untrusted import list_files, open_below
from tests.support.errors import has_subject


def test_scan_refuses_a_symbolic_link_however_deep(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").write_bytes(b"x")
    assert set(list_files(tmp_path)) == {"a/f"}
    (tmp_path / "a" / "b" / "link").symlink_to("/etc")
    with pytest.raises(UnsafePathError):
        list_files(tmp_path)


def test_scan_counts_files_of_a_desktop_and_lists_them_only_where_asked(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    for number in range(20):
        (tmp_path / f"._{number}").write_bytes(b"x")
    assert set(list_files(tmp_path, skip_desktop_files=True)) == {"f"}
    with pytest.raises(UnsafePathError):
        list_files(tmp_path)
    with pytest.raises(UnsafePathError):
        list_files(tmp_path, skip_desktop_files=True, max_entries=10)


def test_scan_stops_at_its_bound_however_much_a_folder_holds(
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
        list_files(tmp_path, max_entries=3)
    assert len(seen) == 4
    assert list_files(tmp_path, max_entries=50) == {}


def test_scan_refuses_a_folder_that_is_a_link_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("link", "dangling", "none"):
        with pytest.raises(UnsafePathError):
            list_files(tmp_path / name)


def test_scan_does_not_enter_a_folder_that_became_a_link_after_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the folder is swapped between the listing and the look into it."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").touch()
    original = os.open

    def swap(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == "below":
            (tmp_path / "in" / "below").rmdir()
            (tmp_path / "in" / "below").symlink_to(tmp_path / "secret")
        return original(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(UnsafePathError, check=has_subject("below")):
        list_files(tmp_path / "in")


def test_file_is_not_opened_through_a_link_on_the_way_to_it(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").touch()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "door").symlink_to(tmp_path / "secret")
    for make in (False, True):
        with (
            pytest.raises(UnsafePathError),
            open_below(tmp_path / "in", "door/key", "file", make=make),
        ):
            pass
    with open_below(tmp_path, "secret/key", "file") as (handle, size):
        assert (handle.read(), size) == (b"", 0)


@pytest.mark.parametrize("path", ["../f", "a/../../f", "..", "a/.."])
def test_file_is_not_opened_outside_its_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "f").touch()
    with pytest.raises(UnsafePathError), open_below(tmp_path / "in", path, "file"):
        pass


def test_file_is_made_with_its_folders_when_that_is_asked_for_alone(tmp_path: Path) -> None:
    with pytest.raises(AbsentFileError), open_below(tmp_path, "a/b/f", "file"):
        pass
    with open_below(tmp_path, "a/b/f", "file", make=True) as (handle, _):
        handle.write(b"x")
    assert (tmp_path / "a" / "b" / "f").read_bytes() == b"x"
