"""Where a site's images are, and how they are read: what every step of the site needs to know about them."""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays
from ddm.images.column_names import part_of
from ddm.images.columns import names_of, read_column
from ddm.images.find import DataSet, find_data
from ddm.images.patients import PatientRule
from ddm.images.picture import DecodeLimits
from ddm.images.selected_rows import SelectedRows
from ddm.images.text_reader import reader_path
from ddm.images.types import Bounds
from ddm.system.cores import usable_cores
from silo.config import ImagesSettings, Site

FOLDER = "images"  # of scans, in a site's private folder
TEST = "test"
_DECODER_PACKAGES = (
    "pydicom",
    "python-gdcm",
    "pylibjpeg-openjpeg",
    "pyjpegls",
    "nibabel",
    "pillow",
    "tifffile",
    "imagecodecs",
    "numpy",
)
_DECODERS_VERSION = 10  # changes with what our decoders and `record_of` return


@dataclass(frozen=True)
class ImageSource:
    """A site's images.

    Attributes:
        data: a folder, a table, or a file.
        folder: private, for the memory of scans and the decisions of a person.
        settings: how images are found and decoded.
        parts: the parts of the data set that are used, such as train and validation; None for all but the test part.
        patient_rule: which characters of an identifier distinguish patients.
        declared_range: that policy.toml declares of arrays in floating point; None where it declares none.
        order_key: secret of the order of patients; empty if that order is not needed.
    """

    data: Path
    folder: Path
    settings: ImagesSettings = ImagesSettings()
    parts: tuple[str, ...] | None = None
    patient_rule: PatientRule = "spelling"
    declared_range: Bounds | None = None
    order_key: bytes = field(default=b"", repr=False)

    @classmethod
    def of_site(cls, site: Site) -> "ImageSource":
        """Return the images that a site's configuration names."""
        settings = site.settings()
        declared = site.policy().data
        return cls(
            Path(settings.data),
            site.private / FOLDER,
            settings.images,
            parts=declared.parts,
            patient_rule=declared.patients,
            declared_range=declared.range,
        )

    def ordered_by(self, order_key: bytes) -> "ImageSource":
        """Return the same images with the secret of the order of patients."""
        return replace(self, order_key=order_key)

    def find(self) -> DataSet:
        """Decide what is at the path.

        Raises:
            MissingFileError, DataError: see `ddm.images.find.find_data`.
        """
        settings = self.settings
        return find_data(self.data, settings.columns, outside=settings.outside)

    def arrays(self, data: DataSet) -> ImageArrays:
        """Return the rows of arrays that belong to parts that are used.

        Raises:
            DataError: the data are not arrays; or no row is used.
        """
        arrays = data.require_arrays()
        uses = [self.uses(part) for part in _parts_of(arrays)]
        is_used = np.array(uses, dtype=np.bool_)
        # Also true of arrays without parts, of which the list is empty.
        if is_used.all():
            return arrays
        if not is_used.any():
            raise DataError(
                "images",
                expected="images of a part that is used (data.parts)",
                got="only images of other parts",
                remedy="Correct data.parts in silo.toml: no image belongs to a part that it names.",
            )
        return SelectedRows(arrays, np.flatnonzero(is_used))

    def unused_parts(self, arrays: ImageArrays) -> Counter[str]:
        """Count the rows of arrays by the parts that are not used."""
        return Counter(
            part for part in _parts_of(arrays) if part is not None and not self.uses(part)
        )

    @property
    def limits(self) -> DecodeLimits:
        """The most time and memory that one file may take."""
        return DecodeLimits(
            seconds=self.settings.seconds, memory_bytes=self.settings.memory_mib << 20
        )

    @property
    def num_processes(self) -> int:
        """How many processes decode."""
        return self.settings.processes or usable_cores()

    @property
    def recipe(self) -> str:
        """Names all that the result of a file depends on besides its content."""
        versions = [f"{name} {_version(name)}" for name in _DECODER_PACKAGES]
        # Tesseract gives a second opinion about burned-in text.
        reader = "absent" if reader_path() is None else "installed"
        return f"{_DECODERS_VERSION} {self.limits} {self.patient_rule} {', '.join(versions)}, tesseract {reader}"

    def uses(self, part: str | None) -> bool:
        """Whether pictures of a part are used; pictures that belong to no part always are."""
        if part is None:
            return True
        if self.parts is None:
            # Unless the site names it, the test part is kept for a test: experts must not learn it.
            return part != TEST
        return part in {part_of(name) for name in self.parts}


def _parts_of(arrays: ImageArrays) -> list[str | None]:
    """Return the part of each row; nothing of arrays without a column of parts."""
    for name in ("splits", "parts"):
        if name in arrays.columns:
            return [part_of(text) for text in names_of(read_column(arrays, name))]
    return []


def default_folder(data: Path) -> Path:
    """Return the private folder of a data set's scans outside a site; its name says nothing about the data."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = os.fsencode(data.resolve())
    name = hashlib.sha256(path).hexdigest()[:16]
    return Path(state).expanduser() / "archipelago" / "scans" / name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
