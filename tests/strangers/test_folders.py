"""What lies in a folder that somebody else fills: only plain files are opened, and nothing waits or crashes."""

import os
import socket
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from ddm.errors import ArchipelagoError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import read_bounded
from ddm.io.tensors import check_file, load_tensors, read_header
from ddm.io.untrusted import check_digest, list_files, read_small
from ddm.transport.messages import Span
from ddm.transport.shards import list_folder, read_spans
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.parsers import DIGEST

CANARY = "CANARY"
_LARGE = {"max_bytes": 1 << 20}


def _make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _secret(path: Path) -> Path:
    secret = path.parent.parent / "secret.txt"
    secret.write_text(CANARY)
    return secret


ODD: dict[str, Callable[[Path], object]] = {
    "link to a file": lambda path: path.symlink_to(_secret(path)),
    "link to a folder": lambda path: path.symlink_to(path.parent.parent, target_is_directory=True),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "named pipe": os.mkfifo,
    "socket": _make_socket,
}
FOLDER_READERS: dict[str, Callable[[Path], object]] = {
    "copy_tree_bounded": lambda folder: copy_tree_bounded(
        folder, folder.with_name("copy"), **_LARGE
    ),
    "list_files": list_files,
    "list_folder": lambda folder: list_folder(folder, max_files=100, with_digest=True, **_LARGE),
}
FILE_READERS: dict[str, Callable[[Path], object]] = {
    "read_bounded": lambda path: read_bounded(path, 1 << 20),
    "read_small": lambda path: read_small(path.parent, path.name, 1 << 20),
    "check_digest": lambda path: check_digest(path.parent, path.name, 6, DIGEST),
    "read_spans": lambda path: read_spans(
        path.parent, [Span(path=path.name, offset=0, num_bytes=6)]
    ),
    "read_header": lambda path: read_header(path, **_LARGE),
    "load_tensors": lambda path: load_tensors(path, None, **_LARGE),
    "check_file": lambda path: check_file(path, {}, **_LARGE),
}


def refused(attack: Callable[[], object]) -> None:
    """Refused at once; a reader that waits for the other end of a pipe would hang here until the test's time is up."""
    with pytest.raises(ArchipelagoError) as refusal:
        attack()
    said = str(refusal.value)
    assert CANARY not in said
    assert said.isprintable() and len(said) < 1000
    assert said.encode("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one honest file in a folder."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "below" / "a.json").write_text("{}")
    return tmp_path / "in"


def test_folder_of_plain_files_is_read(folder: Path) -> None:
    for reader, read in FOLDER_READERS.items():
        with case(reader):
            read(folder)


def test_folder_is_refused_with_anything_but_files_and_folders_in_it(folder: Path) -> None:
    for odd, depth in product(ODD, ("", "below")):
        ODD[odd](folder / depth / "x")
        for reader, read in FOLDER_READERS.items():
            with case(odd, depth, reader):
                refused(partial(read, folder))
        (folder / depth / "x").unlink()


def test_file_is_refused_that_is_none(folder: Path) -> None:
    for odd, make in ODD.items():
        make(folder / "x")
        for reader, read in FILE_READERS.items():
            with case(odd, reader):
                refused(partial(read, folder / "x"))
        (folder / "x").unlink()


def test_device_is_refused() -> None:
    for device, reader in product(
        ["/dev/zero", "/dev/full"], ["read_bounded", "read_small", "check_digest", "read_header"]
    ):
        with case(device=device, reader=reader):
            refused(partial(FILE_READERS[reader], Path(device)))


def test_hard_link_is_copied_to_a_file_of_its_own(folder: Path) -> None:
    os.link(_secret(folder / "x"), folder / "hard")
    copy_tree_bounded(folder, folder.with_name("copy"), **_LARGE)
    copied = folder.with_name("copy") / "hard"
    (folder / "hard").write_text("changed later")
    assert copied.read_text() == CANARY and copied.stat().st_nlink == 1


def test_odd_file_name_crashes_no_reader_and_is_never_printed_raw(folder: Path) -> None:
    for name in (b"\xff\xfe", b"a\nb", b"a\x1b[2Jb", b"\xe2\x80\xaegpj.exe", b" ", b"a" * 255):
        odd = folder / os.fsdecode(name)
        odd.symlink_to("nothing")
        for reader, read in FOLDER_READERS.items():
            with case(name, reader):
                refused(partial(read, folder))
        odd.unlink()


def make_deep(folder: Path, depth: int) -> None:
    """Folders in folders until their path is longer than the system takes in one piece."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 200, dir_fd=at)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_folders_deeper_than_any_path_are_refused(folder: Path) -> None:
    make_deep(folder, 30)
    for reader, read in FOLDER_READERS.items():
        with case(reader):
            refused(partial(read, folder))


BOUNDED: dict[str, Callable[[Path], object]] = {
    **FOLDER_READERS,
    "list_files": lambda folder: list_files(folder, max_entries=200),
    "copy_tree_bounded": lambda folder: copy_tree_bounded(
        folder, folder.with_name("copy"), max_entries=200, **_LARGE
    ),
}


@pytest.mark.parametrize("kind", ["files", "folders"])
@pytest.mark.parametrize("reader", ["copy_tree_bounded", "list_files"])
def test_very_many_entries_are_not_all_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reader: str, kind: str
) -> None:
    for number in range(150):
        (folder / str(number)).touch()
    BOUNDED[reader](folder)
    for number in range(150, 1000):
        (folder / str(number)).touch() if kind == "files" else (folder / str(number)).mkdir()
    looked: list[str] = []
    original = os.scandir

    class CountingScan:
        """Counts the entries that are taken from a folder."""

        def __init__(self, path: object) -> None:
            self._entries = original(path)

        def __enter__(self) -> "CountingScan":
            return self

        def __exit__(self, *error: object) -> None:
            self._entries.close()

        def __iter__(self) -> "CountingScan":
            return self

        def __next__(self) -> object:
            entry = next(self._entries)
            looked.append(entry.name)
            return entry

    monkeypatch.setattr(os, "scandir", CountingScan)
    with pytest.raises(ArchipelagoError, check=has_subject("in")):
        BOUNDED[reader](folder)
    assert len(looked) <= 201


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a million files."""
    folder = tmp_path_factory.mktemp("million") / "in"
    folder.mkdir()
    for group in range(20):  # one inode takes 65,000 names
        source = folder / f"s{group}"
        source.touch()
        for number in range(50_000):
            os.link(source, folder / f"{group}-{number}")
    return folder


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.parametrize("reader", FOLDER_READERS)
def test_folder_of_a_million_files_is_refused_in_bounded_time_and_memory(
    million: Path, reader: str
) -> None:
    outcome = attempt(lambda: FOLDER_READERS[reader](million), mib=128, cpu_s=5)
    assert outcome.error in ("UnsafePathError", "FormatError")
    assert outcome.mib <= 128 and outcome.cpu_s <= 5, outcome
