"""Scans a data set: finds its files, takes from memory what is known, decodes the rest, and counts all of it."""

import csv
import hashlib
import os
from collections.abc import Callable
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from ddm.images.find import find_files
from ddm.images.picture import Limits
from ddm.images.table import Columns
from ddm.io.files import replacing
from silo.config import ImagesSettings
from silo.images.decisions import Decisions
from silo.images.memory import Memory
from silo.images.summary import Summary
from silo.images.walk import Scanned, Walk

QUARANTINE = "quarantine.csv"
FOLDER = "images"  # of scans, in a site's private folder
_DECODERS = (
    "pydicom",
    "python-gdcm",
    "pylibjpeg-openjpeg",
    "pyjpegls",
    "nibabel",
    "pillow",
    "tifffile",
    "pypng",
    "numpy",
)
_RECIPE = 6  # changes with what decoders and `look` return


class Quarantine:
    """The list of what is left out: names of files, for this site alone."""

    def __init__(self, handle: BinaryIO) -> None:
        self._text = TextIOWrapper(handle, encoding="utf-8", errors="surrogateescape", newline="")
        self._rows = csv.writer(self._text)
        self._rows.writerow(("path", "image", "reason", "detail"))

    def add(self, found: Scanned, reason: str, detail: str) -> None:
        """Add a picture, or a file that gives none."""
        self._rows.writerow((found.path, "" if found.place is None else found.place, reason, detail))

    def close(self) -> None:
        """Write the rest; the file stays open."""
        self._text.flush()
        self._text.detach()


def limits_of(settings: ImagesSettings) -> Limits:
    """Return the limits that a site sets for each file."""
    return Limits(seconds=settings.seconds, memory_bytes=settings.memory_mib << 20)


def processes_of(settings: ImagesSettings) -> int:
    """Return how many processes of a site decode."""
    return settings.processes or len(os.sched_getaffinity(0))


def default_folder(data: Path) -> Path:
    """Return the private folder of a data set's scans outside a site; its name tells nothing."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    name = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:16]
    return Path(state).expanduser() / "archipelago" / "scans" / name


def scan_as_set(
    data: Path,
    folder: Path,
    settings: ImagesSettings,
    advance: Callable[[int], None] = lambda done: None,
    also: Callable[[Scanned], None] = lambda found: None,
) -> Summary:
    """Scan a data set as a site's configuration says; see `scan`."""
    limits, num = limits_of(settings), processes_of(settings)
    return scan(data, folder, limits, columns=settings.columns, processes=num, advance=advance, also=also)


def recipe(limits: Limits) -> str:
    """Name all that the result of a file depends on besides its content."""
    versions = []
    for name in _DECODERS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    return f"{_RECIPE} {limits} {', '.join(versions)}"


def scan(
    data: Path,
    folder: Path,
    limits: Limits,
    *,
    columns: Columns | None = None,
    processes: int = 1,
    advance: Callable[[int], None] = lambda done: None,
    also: Callable[[Scanned], None] = lambda found: None,
) -> Summary:
    """Scan a data set, and write the list of what is quarantined into its private folder.

    Args:
        data: see `ddm.images.find.find_files`.
        folder: private; what it remembers is not decoded again.
        limits: of each file.
        columns: other names of a table's columns.
        processes: that decode.
        advance: called with the number of files that are done.
        also: called with each picture, and with each file that gives none.

    Raises:
        MissingFileError, DataError: see `find_files`.
        BusyError: another scan works in the folder.
        SetupError: the decoders of these images are not installed.
    """
    summary = Summary()
    with Memory.opened(folder, recipe(limits)) as memory, Decisions.opened(folder) as decisions:
        with replacing(folder / QUARANTINE, mode=0o600) as handle:
            quarantine = Quarantine(handle)

            def take(found: Scanned) -> None:
                if found.reason is not None:
                    summary.quarantine(found.reason)
                    quarantine.add(found, found.reason, found.detail)
                elif found.seen is not None:
                    summary.accept(found.seen, found.label, found.split, found.patient(memory.key))
                also(found)

            walk = Walk(memory, decisions, take)
            walk.go(find_files(data, columns or {}), limits, processes, advance)
            quarantine.close()
        memory.forget_others()
    summary.read, summary.decoded = walk.read, walk.decoded
    return summary
