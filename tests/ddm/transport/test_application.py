"""The one application that a silo runs: the package's own, whoever packed it, and nothing that differs in a byte."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

import aggregator.runtime
from ddm.errors import DigestError
from ddm.transport.application import MAX_APPLICATION_BYTES, application_digest, check_application
from tests.support.errors import has_subject

# Flower builds archives by a pattern of pathspec's that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
FOLDER = Path(aggregator.runtime.__file__).parent / "flower_app"
CLIENT = "archipelago_app/client.py"


@pytest.fixture(scope="module")
def shipped() -> bytes:
    """What `aggregator run` submits."""
    return build_fab_from_disk(FOLDER)


def files_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def packed(files: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as made:
        for name, data in files.items():
            made.writestr(name, data)
    return buffer.getvalue()


def test_application_of_this_package_is_the_pinned_one_however_it_was_packed(
    shipped: bytes,
) -> None:
    """A change of `flower_app` needs its new digest in `ddm.transport.application`, and both sides the new version."""
    check_application(shipped)
    files = files_of(shipped)
    check_application(packed(files))
    check_application(packed(dict(reversed(files.items())), zipfile.ZIP_DEFLATED))
    settings = files["pyproject.toml"].replace(b"\n[", b"\n# a remark\n[")
    check_application(packed(files | {"pyproject.toml": settings}))


@pytest.mark.parametrize(
    "change",
    [
        lambda files: {**files, CLIENT: files[CLIENT] + b"\nimport os\n"},
        lambda files: {**files, "archipelago_app/more.py": b""},
        lambda files: {**files, "sitecustomize.py": b"import os"},
        lambda files: {name: data for name, data in files.items() if name != CLIENT},
        lambda files: {
            **files,
            "pyproject.toml": files["pyproject.toml"].replace(b"client:app", b"server:app"),
        },
        lambda files: {**files, "pyproject.toml": b"= no settings"},
        lambda files: {**files, "a": b"0" * (MAX_APPLICATION_BYTES + 1)},
        lambda files: {**files, **{f"{number}": b"" for number in range(20)}},
    ],
)
def test_application_that_differs_is_refused(
    shipped: bytes, change: Callable[[dict[str, bytes]], dict[str, bytes]]
) -> None:
    with pytest.raises(DigestError, check=has_subject("the shipped application")):
        check_application(packed(change(files_of(shipped)), zipfile.ZIP_DEFLATED))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archive_with_two_files_of_one_name_is_refused(shipped: bytes) -> None:
    """The attack: one reader takes the first of the two, another the second."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in [(CLIENT, b"import os"), *files_of(shipped).items()]:
            made.writestr(name, data)
    with pytest.raises(DigestError):
        check_application(buffer.getvalue())


def test_no_flipped_byte_of_the_archive_passes_but_where_it_means_nothing(shipped: bytes) -> None:
    for at in range(len(shipped)):
        flipped = shipped[:at] + bytes([shipped[at] ^ 1]) + shipped[at + 1 :]
        if application_digest(flipped) == application_digest(shipped):
            with zipfile.ZipFile(io.BytesIO(flipped)) as opened:
                kept = {
                    name: opened.read(name) for name in opened.namelist() if name != ".info/CONTENT"
                }
            assert kept == {
                name: data for name, data in files_of(shipped).items() if name != ".info/CONTENT"
            }


def test_rubbish_in_place_of_an_archive_is_refused() -> None:
    for data in (b"", b"PK\x03\x04", b"x" * 1000, b"0" * (MAX_APPLICATION_BYTES + 1), packed({})):
        assert application_digest(data) is None
        with pytest.raises(DigestError, check=has_subject("the shipped application")):
            check_application(data)
