"""`silo scan --preview`: accepted pictures before and after a recipe's or a plan's transform, on one sheet."""

import heapq
import json
import secrets
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

from ddm.errors import SetupError
from ddm.images.jobs import Found, Job
from ddm.images.picture import Limits, Picture
from ddm.images.workers import decode_in_order
from ddm.io.files import read_bounded, require_file, require_folder
from ddm.io.settings import Settings, misfit
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from silo.images.memory import KEY_BYTES
from silo.images.walk import Scanned

_MOST = 64  # pictures
_MOST_PLAN_BYTES = 1 << 22


class Wanted(Settings):
    """What a sheet needs of a recipe or a plan; the rest is not read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    data: DataSpec
    transform: TransformSpec


def read_wanted(path: Path) -> Wanted:
    """Read the tables `data` and `transform` of a recipe (TOML) or of a plan (JSON).

    Raises:
        MissingFileError: there is no such file.
        FormatError: it is too long.
        SetupError: it is neither, or these tables do not stand in it, or do not fit.
    """
    require_file(path, "a recipe (TOML) or a plan (JSON)")
    text = read_bounded(path.resolve(), _MOST_PLAN_BYTES, subject=str(path))
    try:
        content: Any = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text.decode("utf-8"))
        found = Wanted.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise misfit(path, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise SetupError(str(path), expected="TOML, or JSON in a file named .json", got=str(error)[:200]) from error
    if wrong := found.transform.misfit(found.data):
        raise SetupError(f"{path}, field transform", expected=wrong, got="a transform for other samples")
    return found


class Chosen:
    """Up to 64 accepted pictures that differ, by their digests: the same ones each time, of all parts of the data."""

    def __init__(self) -> None:
        self._heap: list[int] = []  # of digests, below zero, so that the largest is on top
        self._places: dict[int, tuple[str, int]] = {}

    def take(self, found: Scanned) -> None:
        """Look at what a scan found."""
        if found.reason is not None or found.seen is None or found.place is None:
            return
        digest, place = -int(found.seen.pixels, 16), (found.path, found.place)
        if digest in self._places:
            self._places[digest] = min(self._places[digest], place)
        elif len(self._heap) < _MOST or digest > self._heap[0]:
            self._places[digest] = place
            heapq.heappush(self._heap, digest)
            if len(self._heap) > _MOST:
                del self._places[heapq.heappop(self._heap)]

    def places(self) -> list[tuple[str, int]]:
        """Return file and place of each, in the order of the names."""
        return sorted(self._places.values())

    def pictures(self, limits: Limits) -> Iterator[Picture]:
        """Decode them again, in the same order."""
        places: dict[str, set[int]] = {}
        for path, place in self.places():
            places.setdefault(path, set()).add(place)
        jobs = [Job(path, (path,), Path(path).stat().st_size) for path in places]
        place = 0
        for found in decode_in_order(jobs, limits, secrets.token_bytes(KEY_BYTES), num=1):
            if isinstance(found, Found):
                if place in places[found.job.path] and found.picture is not None:
                    yield found.picture
                place += 1
            else:
                place = 0


class Sheet:
    """The sheet of one scan.

    Args:
        plan: the recipe or the plan that has the transform.
        out: where to write the PNG, for its owner alone.
        limits: of each file.

    Raises:
        MissingFileError: no such plan, or no folder for the sheet.
        SetupError: see `read_wanted`.
    """

    def __init__(self, plan: Path, out: Path, limits: Limits) -> None:
        self._wanted, self._out, self._limits = read_wanted(plan), out, limits
        self._chosen = Chosen()
        require_folder(out.absolute().parent, "a folder for the sheet")

    def take(self, found: Scanned) -> None:
        """Look at what a scan found."""
        self._chosen.take(found)

    def write(self) -> list[str]:
        """Write the sheet.

        Returns:
            Why each picture was not taken that was not, by its number on the sheet from 1.

        Raises:
            DataError: no picture.
            OSError: the file cannot be written.
        """
        from ddm.images.preview import contact_sheet
        from ddm.images.transform import Transform

        transform = Transform(self._wanted.transform, self._wanted.data)
        return contact_sheet(self._chosen.pictures(self._limits), transform, self._out)
