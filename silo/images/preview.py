"""`silo scan --preview`: accepted pictures before and after a recipe's or a plan's transform, on one sheet."""

import heapq
import json
import secrets
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

from ddm.errors import DataError, SetupError
from ddm.images.picture import DecodeLimits, Picture
from ddm.images.ranges import EnlargementCounter
from ddm.images.workers import DecodedImage, DecodeJob, DecoderOptions, decode_files
from ddm.io.files import read_bounded, require_file, require_folder
from ddm.io.settings import Settings, settings_error
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from silo.images.memory import KEY_BYTES
from silo.images.scanned_image import ScannedImage
from silo.images.sheet_index import FILE, SheetPicture, write_index
from silo.images.source import ImageSource

_MAX_PICTURES = 64
_MAX_PLAN_BYTES = 1 << 22


class PreviewPlan(Settings):
    """What a sheet needs of a recipe or a plan; the rest is not read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    data: DataSpec
    transform: TransformSpec


def read_preview_plan(path: Path) -> PreviewPlan:
    """Read the tables `data` and `transform` of a recipe (TOML) or of a plan (JSON).

    Raises:
        MissingFileError: there is no such file.
        FormatError: it is too long.
        SetupError: it is neither, or has no such tables, or they do not fit.
    """
    require_file(path, "a recipe (TOML) or a plan (JSON)")
    data = read_bounded(path.resolve(), _MAX_PLAN_BYTES, subject=str(path))
    try:
        content: Any
        if path.suffix.lower() == ".json":
            content = json.loads(data)
        else:
            content = tomllib.loads(data.decode("utf-8"))
        plan = PreviewPlan.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise settings_error(path, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise SetupError(
            str(path),
            expected="TOML, or JSON in a file named .json",
            got=str(error)[:200],
        ) from error
    needed_samples = plan.transform.misfit(plan.data)
    if needed_samples:
        got = "a transform for other samples"
        raise SetupError(f"{path}, field transform", expected=needed_samples, got=got)
    return plan


class PreviewSelection:
    """Up to 64 accepted pictures that differ, by their fingerprints: the same each time, of all parts of the data.

    Fingerprints are digests, so that the smallest ones are a random choice which does not depend on the files' order.
    """

    def __init__(self) -> None:
        # A heap has its smallest number on top: of fingerprints as negative numbers, the largest fingerprint.
        self._heap: list[int] = []
        self._pictures: dict[int, SheetPicture] = {}

    def take(self, image: ScannedImage) -> None:
        """Consider an image of a scan."""
        if image.reason is not None:
            return
        if image.record is None or image.place is None:
            return
        pixels = image.record.pixels
        rank = -int(pixels, 16)
        picture = SheetPicture(image.path, image.place, pixels)
        if rank in self._pictures:
            # Copies share a fingerprint; the first by name stands for all of them.
            known = self._pictures[rank]
            self._pictures[rank] = min(known, picture, key=_location)
            return
        is_full = len(self._heap) == _MAX_PICTURES
        if is_full and rank < self._heap[0]:
            return
        self._pictures[rank] = picture
        heapq.heappush(self._heap, rank)
        if is_full:
            replaced_rank = heapq.heappop(self._heap)
            del self._pictures[replaced_rank]

    def pictures(self) -> list[SheetPicture]:
        """Return the pictures, in the order of their files' names."""
        return sorted(self._pictures.values(), key=_location)

    def decoded(self, limits: DecodeLimits) -> Iterator[tuple[SheetPicture, Picture]]:
        """Decode the pictures again, in the same order; those that their files no longer give are left out."""
        by_path: dict[str, dict[int, SheetPicture]] = {}
        for picture in self.pictures():
            pictures_of_file = by_path.setdefault(picture.path, {})
            pictures_of_file[picture.place] = picture
        jobs = []
        for path in by_path:
            num_bytes = Path(path).stat().st_size
            jobs.append(DecodeJob(path, (path,), num_bytes))
        # Any key will do, because the fingerprints of this decoding are not used.
        key = secrets.token_bytes(KEY_BYTES)
        options = DecoderOptions(limits, key, with_values=True)
        place = 0
        for answer in decode_files(jobs, options):
            if not isinstance(answer, DecodedImage):
                place = 0
                continue
            pictures_of_file = by_path[answer.job.path]
            sheet_picture = pictures_of_file.get(place)
            place += 1
            if sheet_picture is not None and answer.picture is not None:
                yield sheet_picture, answer.picture


def _location(picture: SheetPicture) -> tuple[str, int]:
    return picture.path, picture.place


class PreviewSheet:
    """The sheet of one scan, and the index of its numbers.

    Args:
        plan: the recipe or the plan that has the transform.
        out: where to write the PNG, for its owner alone; the index is beside it.
        source: the images that are scanned.

    Raises:
        MissingFileError: no such plan, or no folder for the sheet.
        SetupError: see `read_preview_plan`.
    """

    def __init__(
        self,
        plan: Path,
        out: Path,
        source: ImageSource,
    ) -> None:
        self._plan = read_preview_plan(plan)
        self._out = out
        self._source = source
        self._selection = PreviewSelection()
        require_folder(out.absolute().parent, "a folder for the sheet")

    @property
    def index_path(self) -> Path:
        """Where the numbers on the sheet and the names of files are."""
        return self._out.with_name(f"{self._out.name}.csv")

    def take(self, image: ScannedImage) -> None:
        """Consider an image of a scan."""
        self._selection.take(image)

    def write(self) -> list[str]:
        """Write the sheet and its index.

        Returns:
            For each picture that the transform does not take, its number and the reason; and how many are enlarged.

        Raises:
            DataError: no picture.
            OSError: a file cannot be written.
        """
        from ddm.images.preview import contact_sheet
        from ddm.images.transform import Transform

        sheet_pictures: list[SheetPicture] = []
        transform = Transform(self._plan.transform, self._plan.data)
        enlargements = EnlargementCounter()

        def numbered_pictures() -> Iterator[Picture]:
            for sheet_picture, picture in self._selection.decoded(self._source.limits):
                sheet_pictures.append(sheet_picture)
                # The sheet itself says so of a picture that the plan does not take.
                with suppress(DataError):
                    sides, resampled_sides = transform.resampled_sides(picture)
                    enlargements.add(sides, resampled_sides)
                yield picture

        reasons = contact_sheet(numbered_pictures(), transform, self._out)
        private_index_path = self._source.folder / FILE
        write_index(sheet_pictures, self.index_path, private_index_path)
        remarks = enlargements.remarks("pictures on the sheet")
        return [*reasons, *remarks]
