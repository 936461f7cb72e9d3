"""A job's arrays: how they are named in its document, written beside it, and opened by its processes."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.errors import DataError
from ddm.images.fit import as_floats, fit
from ddm.images.npz import npy_header
from ddm.images.rows import (
    FileArray,
    Images,
    JoinedArrays,
    Scaled,
    Selected,
    StoredArray,
    StoredImages,
    blocks,
    write_rows,
)
from ddm.io.files import link_or_copy, replacing
from ddm.training.job import ArrayLocation, CopiedArray, Input, JobFolder, ReferencedImages


def write_inputs(
    inputs: Mapping[str, Images], files: Mapping[str, Path], folder: JobFolder, *, alone: bool
) -> dict[str, Input]:
    """Write what the processes of a job read into its folder, and return how its document names it.

    Args:
        inputs: by name.
        files: an npy that holds one of them exactly, and is linked instead.
        folder: the job's.
        alone: whether the folder must hold everything; else images that lie in files already are read there.

    Raises:
        OSError: the disk is full.
    """
    kept: dict[str, Input] = {}
    for name, images in inputs.items():
        path, referred = folder.array(name), None if alone else _referred(images, folder, name)
        path.unlink(missing_ok=True)
        if name in files and referred is None:
            link_or_copy(files[name], path)
        elif referred is None:
            _copy(images, path)
        kept[name] = referred or CopiedArray(place=_place_of_npy(path, folder))
    return kept


def open_input(given: Input, folder: JobFolder) -> Images:
    """Open one of a job's arrays, in the type that it is stored in or, of images that lie elsewhere, as float32.

    Raises:
        DataError: the file is not there, or shorter than the document says.
    """
    if isinstance(given, CopiedArray):
        return _mapped(given.place, folder)
    arrays = tuple(_array(place, folder) for place in given.places)
    array: StoredArray = arrays[0] if len(arrays) == 1 else JoinedArrays(arrays)
    fitted = given.fitted
    convert, shape = (
        (partial(fit, spec=fitted), fitted.shape) if fitted else (as_floats, array.shape[1:])
    )
    images: Images = StoredImages(array, convert, shape)
    if given.shift is not None and given.scale is not None:
        images = Scaled(images, given.shift, given.scale)
    return images if given.chosen is None else Selected(images, _mapped(given.chosen, folder))


def _referred(images: Images, folder: JobFolder, name: str) -> ReferencedImages | None:
    """Return where images lie already; None where that is nowhere, or in a way that the document has no words for."""
    selected = images if isinstance(images, Selected) else None
    whole = selected.images if selected else images
    scaled = whole if isinstance(whole, Scaled) else None
    stored = scaled.images if scaled else whole
    if not isinstance(stored, StoredImages):
        return None
    convert, array = stored.convert, stored.array
    fitted = (
        convert.keywords["spec"] if isinstance(convert, partial) and convert.func is fit else None
    )
    arrays = array.parts if isinstance(array, JoinedArrays) else (array,)
    if (fitted is None and convert is not as_floats) or not all(
        isinstance(each, FileArray) for each in arrays
    ):
        return None
    rows = None
    if selected is not None:
        path = folder.path / f"{name}-rows.npy"
        with replacing(path) as handle:
            write_rows(handle, (len(selected),), np.dtype("<i8"), [selected.chosen_N.numpy()])
        rows = _place_of_npy(path, folder)
    places = tuple(_place_of(each) for each in arrays if isinstance(each, FileArray))
    shift, scale = (scaled.shift, scaled.scale) if scaled else (None, None)
    return ReferencedImages(places=places, fitted=fitted, chosen=rows, shift=shift, scale=scale)


def _place_of(array: FileArray) -> ArrayLocation:
    return ArrayLocation(
        path=str(array.path.resolve()),
        dtype=array.dtype.str,
        shape=array.shape,
        offset=array.offset,
    )


def _place_of_npy(path: Path, folder: JobFolder) -> ArrayLocation:
    header, name = npy_header(path), str(path.relative_to(folder.path))
    return ArrayLocation(
        path=name, dtype=header.dtype.str, shape=header.shape, offset=header.offset
    )


def _copy(images: Images, path: Path) -> None:
    """Write images as float32, and any other tensor as it is; the padding of texts stays a hole in the file."""
    values = images.detach().cpu().numpy() if isinstance(images, Tensor) else None
    with replacing(path) as handle:
        if values is None or values.ndim != 3:
            dtype = np.dtype("<f4") if values is None else values.dtype
            write_rows(handle, images.shape, dtype, (block for _, block in blocks(images)))
            return
        header = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
        np.lib.format.write_array_header_1_0(handle, header)
        begin = handle.tell()
        for number, row in enumerate(values):
            handle.seek(begin + number * row.nbytes)
            handle.write(row.tobytes().rstrip(b"\0"))
        handle.truncate(begin + values.nbytes)


def _array(place: ArrayLocation, folder: JobFolder) -> FileArray:
    try:
        return FileArray(folder.path / place.path, np.dtype(place.dtype), place.shape, place.offset)
    except OSError as error:
        raise DataError(
            "images of a job",
            expected="the files that job.json names",
            got=error.strerror or "none that can be opened",
            remedy="Each machine of the job must see them under the same path: set training.jobs in silo.toml to a "
            "folder that all of them see, and training.launcher, and the images are copied there.",
        ) from error


def _mapped(place: ArrayLocation, folder: JobFolder) -> Tensor:
    """Map an array; what is written into it stays with this process."""
    # which checks the length, since reading beyond the end of a mapping kills
    array = _array(place, folder)
    mapped = np.memmap(array.path, array.dtype, mode="c", offset=array.offset, shape=array.shape)
    return torch.from_numpy(mapped)
