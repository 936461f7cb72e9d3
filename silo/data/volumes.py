"""Reads a folder of NIfTI volumes, one after the other; no error names a file.

Under a plan without a table `[transform]` every volume goes through the same steps, the defaults of that table:

1. Its axes are turned and flipped, without resampling, so that D runs from inferior to superior, H from anterior to
   posterior and W from the patient's right to the left: slice by slice the picture that radiologists see.
2. Its values, scaled as the file says, are mapped so that their 0.5th and 99.5th percentiles, all channels together,
   become the ends of the plan's range; values beyond are clipped.
3. It is resampled (trilinear, smoothed first where it shrinks) to cubic voxels of the largest side for which no axis
   is shorter than the plan's; then the middle of each axis is kept. Proportions stay those of the patient, nothing is
   padded, and only the ends of axes that are too long are lost.

Only plain arrays leave this module: MONAI's tensors carry the names of their files.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ddm.errors import ArchipelagoError, DataError, SetupError
from ddm.imaging.geometry import Floats
from ddm.imaging.picture import Picture
from ddm.imaging.transform import Transform, about
from ddm.io.files import read_bounded, require_file
from ddm.protocol.plan import DataSpec, TransformSpec
from silo.images.entries import FOLDER_TABLE

_ENDINGS = (".nii", ".nii.gz")
_AXES = "SPL"
_RECIPE = "NIfTI 1"  # changes with the steps above, so that nothing kept from others is found
_MAX_TABLE_BYTES = 1 << 26
_MAX_CELL = 4096  # characters; the widest cell sets the memory of its column
_COLUMNS = {"patients": "patient", "labels": "label", "captions": "caption"}


def are_volumes(path: Path) -> bool:
    """Whether `path` is a folder with volumes or a single volume."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    return any(name.endswith(_ENDINGS) for name in names)


class Volumes:
    """The volumes of a folder, in the order of the files' names, as a `ddm.io.sources.Source`.

    Args:
        path: a folder with `*.nii` and `*.nii.gz`, or one such file. A fourth axis of a file are its channels.
        spec: the plan's shape and range.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no volumes, or a plan of images.
    """

    name: Literal["images"] = "images"

    def __init__(self, path: Path, spec: DataSpec) -> None:
        if len(spec.shape) != 4:
            raise DataError("data", expected=f"images {spec.shape}, as the plan requires", got="NIfTI volumes")
        self._path, self._spec = path, spec
        self.files = tuple(volume_files(path))
        self.row = np.dtype(np.float32), tuple(spec.shape)
        self.recipe = f"{_RECIPE} {spec.model_dump_json()}"

    def __len__(self) -> int:
        return len(self.files)

    def in_place(self) -> None:
        """Return None: no volume lies in its file as the plan wants it."""

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        """Yield the volumes one by one, float32 (1, C, D, H, W) in the plan's range.

        Raises:
            DataError: a volume that is damaged, constant, not finite, with the wrong number of channels or with an axis
                of no length, or that memory does not hold.
            SetupError: MONAI or nibabel is not installed.
        """
        transform = Transform(TransformSpec(), self._spec, resample=_trilinear)
        for (sample,) in read_volumes(self.files, transform):
            yield sample[None]

    @property
    def columns(self) -> frozenset[str]:
        """None: a folder of volumes has no columns."""
        return frozenset()

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        """Return a column of the table beside the volumes, whose cells have a bound of their own."""
        return read_volume_column(self._path, name, len(self))

    def column_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column, one entry for each volume."""
        return (len(self),)


def read_volumes(files: Sequence[Path], transform: Transform) -> Iterator[list[Floats]]:
    """Yield the samples of each volume, one volume after the other.

    Raises:
        DataError: a volume that is damaged, or that the transform does not take; names its number.
        SetupError: MONAI or nibabel is not installed.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _load_monai()
    for number, file in enumerate(files):
        subject = f"volume {number + 1} of {len(files)}, by name"
        try:
            with about(subject):
                samples = transform.apply(_read(file, memory))
        except ArchipelagoError:
            raise
        except Exception as error:  # whatever gzip, nibabel and MONAI may raise; its text names the file
            got = f"a file that does not read as one ({type(error).__name__})"
            raise DataError(subject, expected="a NIfTI volume", got=got) from error
        yield samples


def volume_files(path: Path) -> list[Path]:
    """Return the volumes of a folder by name, or the one that `path` is.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: a folder without volumes.
    """
    if not path.is_dir():
        return [require_file(path, "a NIfTI volume, or a folder of them")]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_ENDINGS) and file.is_file())
    if not files:
        raise DataError("data folder", expected="volumes, *.nii or *.nii.gz", got="no such file")
    return files


def volume_columns(path: Path) -> tuple[str, ...]:
    """Return which of patients, labels and captions `volumes.csv` has; none where there is no table."""
    table_path = (path if path.is_dir() else path.parent) / FOLDER_TABLE
    if not table_path.is_file():
        return ()
    header = read_bounded(table_path, _MAX_TABLE_BYTES).partition(b"\n")[0].decode("utf-8-sig", "replace")
    named = {cell.strip().strip('"') for cell in header.split(",")}
    return tuple(name for name, column in _COLUMNS.items() if column in named)


def read_volume_column(path: Path, name: str, num: int) -> NDArray[np.generic]:
    """Read one column of `volumes.csv`, which lies beside the volumes, in the order of `Volumes`.

    The table has a column `file`, the name within the folder, once for each volume, and `patient`, `label` or
    `caption`.

    Args:
        path: see `Volumes`.
        name: `patients`, `labels` or `captions`.
        num: how many volumes there are.

    Raises:
        MissingFileError: no table.
        DataError: not a CSV, no such column, not one row for each volume, or a cell that is too long.
    """
    table_path = (path if path.is_dir() else path.parent) / FOLDER_TABLE
    data = read_bounded(require_file(table_path, "a table of the volumes"), _MAX_TABLE_BYTES)
    column = _COLUMNS[name]
    import pandas as pd

    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):  # a row longer than the first
            table = pd.read_csv(BytesIO(data), dtype=str, keep_default_na=False, index_col=False)
        of_file = dict(zip(table["file"], table[column], strict=True))
    except (ValueError, KeyError, pd.errors.ParserWarning) as error:  # pandas' own errors are among the first
        got = "a CSV without one of them" if isinstance(error, KeyError) else "a file that does not parse as CSV"
        raise DataError(FOLDER_TABLE, expected=f"a CSV with columns file and {column}", got=got) from error
    names = [file.name for file in volume_files(path)]
    missing, repeated = len(set(names) - set(of_file)), len(table) - len(of_file)
    if len(names) != num or missing or repeated:
        got = f"{len(names)} volumes, {missing} of them without a row, and {repeated} repeated rows"
        raise DataError(FOLDER_TABLE, expected=f"one row for each of {num} volumes", got=got)
    cells = [of_file[each].strip() for each in names]
    if (longest := max(map(len, cells))) > _MAX_CELL:
        raise DataError(name, expected=f"at most {_MAX_CELL} characters each", got=f"a cell of {longest}")
    return np.array(cells)


def _read(file: Path, memory: int) -> Picture:
    """Read one volume, turned; the size in its header is held against memory before any voxel is read."""
    from monai.data import NibabelReader
    from monai.transforms import LoadImage, Orientation

    size_bytes = 4 * prod(int(side) for side in NibabelReader().read(str(file)).shape)
    if size_bytes > memory:
        raise DataError("voxels", expected=f"at most {memory} bytes of memory", got=f"{size_bytes} bytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LoadImage makes its other readers too, and tells of decoders that they miss
        load = LoadImage(reader="NibabelReader", image_only=True, ensure_channel_first=True)
    volume: Any = load(str(file))
    if volume.ndim != 4:
        raise DataError("volume", expected="3 axes, and maybe a fourth of channels", got=f"{volume.ndim - 1} axes")
    labels = (("L", "R"), ("P", "A"), ("I", "S"))
    volume = Orientation(axcodes=_AXES, labels=labels)(volume)
    values = volume.as_tensor().numpy().astype(np.float32)
    return Picture(values, spacing=tuple(float(length) for length in volume.pixdim))


def _trilinear(values: Floats, size: tuple[int, ...]) -> Floats:
    """Resample as plans without a table `[transform]` do: MONAI smooths by a Gaussian, over a border of zeros."""
    from monai.transforms import Resize

    resize = Resize(spatial_size=size, mode="trilinear", align_corners=False, anti_aliasing=True)
    resized: Any = resize(torch.from_numpy(values))
    found: Floats = torch.as_tensor(resized.as_tensor() if hasattr(resized, "as_tensor") else resized).numpy()
    return found


def _load_monai() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # raised by third-party imports
            for name in ("monai.data", "monai.transforms", "nibabel"):  # MONAI reads NIfTI with nibabel
                import_module(name)
    except ImportError as error:
        remedy = "Install them: pip install 'monai[einops,nibabel]>=1.4'."
        raise SetupError(
            "NIfTI volumes", expected="MONAI and nibabel installed", got=f"no module {error.name}", remedy=remedy
        ) from error
