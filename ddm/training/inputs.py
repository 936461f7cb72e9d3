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
    ScaledImages,
    SelectedImages,
    StoredArray,
    StoredImages,
    blocks,
    write_rows,
)
from ddm.io.files import link_or_copy, replacing
from ddm.training.job import ArrayLocation, CopiedArray, Input, JobFolder, ReferencedImages


def write_inputs(
    inputs: Mapping[str, Images], files: Mapping[str, Path], folder: JobFolder, *, is_complete: bool
) -> dict[str, Input]:
    """Write what the processes of a job read into its folder, and return how its document names it.

    Args:
        inputs: by name.
        files: npy files that hold one of them exactly, and are linked instead.
        folder: the job's.
        is_complete: whether the folder must hold everything; otherwise images in files that exist are read there.

    Raises:
        OSError: the disk is full.
    """
    documents: dict[str, Input] = {}
    for name, images in inputs.items():
        path = folder.array(name)
        path.unlink(missing_ok=True)
        referenced = None if is_complete else _reference(images, folder, name)
        if referenced is not None:
            documents[name] = referenced
            continue
        if name in files:
            link_or_copy(files[name], path)
        else:
            _copy(images, path)
        documents[name] = CopiedArray(location=_location_in_npy(path, folder))
    return documents


def open_input(document: Input, folder: JobFolder) -> Images:
    """Open one of a job's arrays, in the type that it is stored in or, of images that lie elsewhere, as float32.

    Raises:
        DataError: the file is not there, or shorter than the document says.
    """
    if isinstance(document, CopiedArray):
        return _map(document.location, folder)
    arrays = tuple(_open_array(location, folder) for location in document.locations)
    array: StoredArray = arrays[0] if len(arrays) == 1 else JoinedArrays(arrays)
    if document.fitted is None:
        images: Images = StoredImages(array, as_floats, array.shape[1:])
    else:
        convert = partial(fit, spec=document.fitted)
        images = StoredImages(array, convert, document.fitted.shape)
    if document.shift is not None and document.scale is not None:
        images = ScaledImages(images, document.shift, document.scale)
    if document.chosen is None:
        return images
    return SelectedImages(images, _map(document.chosen, folder))


def _reference(images: Images, folder: JobFolder, name: str) -> ReferencedImages | None:
    """Return where images are stored; None where they are in memory, or the document cannot describe how they are read.

    Images may be rows chosen from scaled values of stored arrays; each of the three is one layer, and each is optional.
    """
    stored = images
    chosen_N = None
    if isinstance(stored, SelectedImages):
        chosen_N = stored.chosen_N
        stored = stored.images
    shift = None
    scale = None
    if isinstance(stored, ScaledImages):
        shift = stored.shift
        scale = stored.scale
        stored = stored.images
    if not isinstance(stored, StoredImages):
        return None
    convert = stored.convert
    fitted = None
    if isinstance(convert, partial) and convert.func is fit:
        fitted = convert.keywords["spec"]
    # Any other function cannot be named in a document, and must not be: reading it back would run a stranger's choice.
    elif convert is not as_floats:
        return None
    array = stored.array
    arrays = array.parts if isinstance(array, JoinedArrays) else (array,)
    locations = []
    for part in arrays:
        if not isinstance(part, FileArray):
            return None
        locations.append(_location_of(part))
    chosen = None
    if chosen_N is not None:
        path = folder.path / f"{name}-rows.npy"
        with replacing(path) as handle:
            # The order of bytes is stated, since machines of a job may differ in it.
            write_rows(handle, (len(chosen_N),), np.dtype("<i8"), [chosen_N.numpy()])
        chosen = _location_in_npy(path, folder)
    return ReferencedImages(
        locations=tuple(locations),
        fitted=fitted,
        chosen=chosen,
        shift=shift,
        scale=scale,
    )


def _location_of(array: FileArray) -> ArrayLocation:
    return ArrayLocation(
        # The processes of a job have other working folders.
        path=str(array.path.resolve()),
        dtype=array.dtype.str,
        shape=array.shape,
        offset=array.offset,
    )


def _location_in_npy(path: Path, folder: JobFolder) -> ArrayLocation:
    header = npy_header(path)
    return ArrayLocation(
        path=str(path.relative_to(folder.path)),
        dtype=header.dtype.str,
        shape=header.shape,
        offset=header.offset,
    )


def _copy(images: Images, path: Path) -> None:
    """Write images as float32, and any other tensor as it is."""
    dtype = np.dtype("<f4")
    values = None
    if isinstance(images, Tensor):
        values = images.detach().cpu().numpy()
        dtype = values.dtype
    with replacing(path) as handle:
        if values is None or values.ndim != 3:
            write_rows(handle, images.shape, dtype, (block for _, block in blocks(images)))
            return
        # Texts, padded with zeros to one length: the padding becomes a hole in the file, which takes no space.
        header = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
        np.lib.format.write_array_header_1_0(handle, header)
        begin = handle.tell()
        for number, row in enumerate(values):
            handle.seek(begin + number * row.nbytes)
            handle.write(row.tobytes().rstrip(b"\0"))
        handle.truncate(begin + values.nbytes)


def _open_array(location: ArrayLocation, folder: JobFolder) -> FileArray:
    path = folder.path / location.path
    try:
        return FileArray(path, np.dtype(location.dtype), location.shape, location.offset)
    except OSError as error:
        raise DataError(
            "images of a job",
            expected="the files that job.json names",
            got=error.strerror or "none that can be opened",
            remedy="Each machine of the job must see them under the same path: set training.jobs in silo.toml to a "
            "folder that all of them see, and training.launcher, and the images are copied there.",
        ) from error


def _map(location: ArrayLocation, folder: JobFolder) -> Tensor:
    """Map an array into memory; what is written into it stays with this process."""
    # This checks the length, since reading beyond the end of a mapping kills the process.
    array = _open_array(location, folder)
    # Copy on write, since torch takes no read-only memory without a warning.
    mapped = np.memmap(array.path, array.dtype, mode="c", offset=array.offset, shape=array.shape)
    return torch.from_numpy(mapped)
