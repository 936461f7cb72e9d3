"""Images of a plan's shape and range that are public or the user's own, from pictures or arrays, with their columns.

Pictures, and arrays of anything else than samples, go through the plan's transform, exactly as at a silo. Without a
transform there are arrays of the plan's shape alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays, open_images
from ddm.images.find import DataSet
from ddm.images.fit import check_row, fit
from ddm.images.npz import read_array
from ddm.images.picture import Picture
from ddm.images.ranges import (
    EnlargementCounter,
    RangeCounter,
    ValueKind,
    range_of_type,
    range_remarks,
)
from ddm.images.read import PictureReader, find_readable
from ddm.images.rows import BLOCK_BYTES, rows_of
from ddm.images.transform import Transform, mapped, with_channels
from ddm.images.types import Mask, Values
from ddm.io.files import require_file
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from ddm.system.memory import machine_bytes

MAX_CELL_BYTES = 16 * 1024  # of one caption or label, with room for four bytes a character
_FLOAT_BYTES = 4
_LABELS = ("labels", "label")
_CAPTIONS = ("captions", "caption")


@dataclass(frozen=True)
class ImageSet:
    """Images of a plan's shape and range.

    Attributes:
        spec: the plan's shape and range.
        files: the files that hold the images, in order.
        arrays: the arrays with their columns; None for pictures in files of their own.
        stored: what the transform made, in its compact type; None for arrays that are read as they are.
        count_P: how many images each picture became; empty where each became one.
        labels: the class of each picture, as a table or its file says; empty for arrays.
        captions: the same of texts.
        remarks: what a person should know about how the images were read.
    """

    spec: DataSpec
    files: tuple[Path, ...]
    arrays: ImageArrays | None = None
    stored: Sequence[Values] | None = None
    count_P: Sequence[int] = ()
    labels: Sequence[str | None] = ()
    captions: Sequence[str | None] = ()
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        if self.stored is not None:
            return len(self.stored)
        if self.arrays is None:
            return 0
        return len(self.arrays)

    @property
    def num_bytes(self) -> int:
        """How much memory the images take already."""
        return sum(sample.nbytes for sample in self.stored or ())

    def blocks(self) -> Iterator[Tensor]:
        """Yield the images in blocks, float32, in the plan's range.

        Raises:
            DataError: values that do not fit the range.
        """
        start = 0
        for block in self._stored_blocks():
            yield fit(block, range(start, start + len(block)), spec=self.spec)
            start += len(block)

    def read(self) -> Tensor:
        """Return all images, shape (N, C, H, W) or (N, C, D, H, W), float32, in the plan's range.

        Raises:
            DataError: values that do not fit the range, or more images than memory holds.
        """
        if self.arrays is not None and self.stored is None:
            return open_images(self.arrays, self.spec, None)[:]
        images = torch.empty(len(self), *self.spec.shape)
        start = 0
        for block in self.blocks():
            images[start : start + len(block)] = block
            start += len(block)
        return images

    @property
    def column_names(self) -> frozenset[str]:
        """The names of the columns that exist."""
        if self.arrays is not None:
            return self.arrays.columns
        names = set()
        if any(self.labels):
            names.add(_LABELS[0])
        if any(self.captions):
            names.add(_CAPTIONS[0])
        return frozenset(names)

    def column(self, name: str) -> Values:
        """Return one entry for each image; of what became several images, each has the same entry.

        Raises:
            MissingFileError, DataError: no such column, or not one entry for each picture.
        """
        if self.arrays is not None:
            num_images = len(self.arrays)
            cells = self.arrays.column(name, MAX_CELL_BYTES)
            if cells.shape[:1] != (num_images,):
                raise DataError(
                    f"column {name}",
                    expected=f"shape ({num_images},), one value an image",
                    got=f"shape {cells.shape}",
                )
        else:
            cells = self._column_of_pictures(name)
        if len(self.count_P):
            return np.repeat(cells, self.count_P, 0)
        return cells

    def range_remarks(self, images: Tensor) -> list[str]:
        """Return what a person should know about how these images, all or some of `read`, use their range."""
        counter = RangeCounter()
        counter.add_images(images.numpy())
        if self.stored is not None or self.arrays is None:
            return range_remarks(counter.use(), self.spec.range, ValueKind.TRANSFORMED)
        dtype, _ = self.arrays.row
        type_range = range_of_type(dtype.name)
        if type_range is None:
            return range_remarks(counter.use(), self.spec.range, ValueKind.FLOATS)
        # Whole numbers were spread over the plan's range by their type: say it in the numbers that the file holds.
        low, high = self.spec.range
        _, largest = type_range
        share = (images.double() - low) / (high - low)
        whole_numbers = (share * largest).round()
        whole_counter = RangeCounter()
        whole_counter.add_images(whole_numbers.numpy())
        return range_remarks(whole_counter.use(), type_range, ValueKind.WHOLE)

    def _stored_blocks(self) -> Iterator[Values]:
        if self.stored is not None:
            num_rows = rows_of(BLOCK_BYTES, self.spec.shape)
            for start in range(0, len(self.stored), num_rows):
                samples = self.stored[start : start + num_rows]
                yield np.stack(samples)
        elif self.arrays is not None:
            yield from self.arrays.unpacked()

    def _column_of_pictures(self, name: str) -> Values:
        cells: Sequence[str | None] = ()
        if name in _LABELS:
            cells = self.labels
        elif name in _CAPTIONS:
            cells = self.captions
        if not any(cells):
            raise DataError(
                f"column {name}",
                expected=f"a column {name}: an array of this name in the file, or labels or captions in a table",
                got="pictures without one",
                remedy="Give the images in one file with this column (npz or Parquet), not as pictures.",
            )
        num_missing = sum(not cell for cell in cells)
        if num_missing:
            raise DataError(
                f"column {name}",
                expected="a value for each image",
                got=f"none for {num_missing} of {len(cells)} images",
                remedy="Give the images a column of this kind, with one entry for each of them, in their order.",
            )
        return np.array(cells, dtype=np.str_)


def open_image_set(
    path: Path,
    spec: DataSpec,
    transform: TransformSpec | None,
    *,
    takes_samples: bool = False,
    subject: str = "images",
) -> ImageSet:
    """Open the images at a path; pictures that a transform is for are read, arrays of samples are not read yet.

    Args:
        path: with a transform, whatever `ddm.images.find.find_data` takes; without one, arrays of the plan's shape.
        spec: the plan's shape and range.
        transform: the plan's.
        takes_samples: take arrays in floating point of the plan's shape as samples, which no transform is for.
        subject: what messages call the images.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no image; images that cannot be used, by the names of their files; or more than memory holds.
    """
    data = find_readable(path)
    if transform is None or (takes_samples and _holds_samples(data, spec)):
        arrays = data.require_arrays()
        if arrays.name != "images":
            raise DataError(
                subject, expected="images", got="latents", remedy="Give images, and not latents."
            )
        check_row(*arrays.row, spec)
        return ImageSet(spec, arrays.files, arrays, remarks=tuple(data.remarks()))
    return _transformed(data, Transform(transform, spec), subject)


def _holds_samples(data: DataSet, spec: DataSpec) -> bool:
    if data.arrays is None or data.arrays.name != "images":
        return False
    dtype, shape = data.arrays.row
    return dtype.kind == "f" and shape == spec.shape


def _transformed(
    data: DataSet,
    transform: Transform,
    subject: str,
) -> ImageSet:
    """Take every picture through the transform; what it makes stays in memory, in its compact type."""
    reader = PictureReader(data, subject)
    enlargements = EnlargementCounter()
    stored: list[Values] = []
    count_P: list[int] = []
    labels: list[str | None] = []
    captions: list[str | None] = []
    memory_bytes = machine_bytes()
    for named in reader:
        try:
            samples = transform.apply(named.picture)
            enlargements.add(*transform.resampled_sides(named.picture))
        except DataError as error:
            reader.refuse(named.name, error)
            continue
        stored.extend(transform.stored(sample) for sample in samples)
        count_P.append(len(samples))
        labels.append(named.label)
        captions.append(named.caption)
        # Beside the compact type, all images are needed in float32 at one time.
        value_bytes = _FLOAT_BYTES + transform.dtype.itemsize
        needed_bytes = len(stored) * transform.data.dim * value_bytes
        if needed_bytes > memory_bytes:
            raise DataError(
                subject,
                expected=f"at most {memory_bytes} bytes of memory",
                got=f"{needed_bytes} bytes",
                remedy="Give fewer or smaller images, or raise the limit with --memory.",
            )
    reader.require_all()
    if not stored:
        raise DataError(
            subject,
            expected="at least one",
            got="an empty folder or array",
            remedy="Name a file or a folder with at least one image.",
        )
    # Parts of a data set, such as train_images, have columns of their own, which came with the pictures.
    arrays = data.arrays
    if arrays is not None and len(arrays) != len(count_P):
        arrays = None
    return ImageSet(
        spec=transform.data,
        files=reader.files(),
        arrays=arrays,
        stored=stored,
        count_P=count_P,
        labels=labels,
        captions=captions,
        remarks=(*reader.remarks(), *enlargements.remarks(subject)),
    )


def read_given_images(path: Path, spec: DataSpec) -> Tensor:
    """Read images to begin from: pictures of the plan's size, or arrays of its shape.

    A picture is not transformed: what its type can hold becomes the plan's range, as `ddm sample` writes pictures.

    Returns:
        Shape (N, C, H, W) or (N, C, D, H, W), float32, in the plan's range.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no picture, one of another size, or values that do not fit the range.
    """
    data = find_readable(path)
    if data.looks_like_arrays:
        return open_image_set(path, spec, None).read()
    reader = PictureReader(data, "picture")
    images = []
    for named in reader:
        try:
            images.append(_given_image(named.picture, spec))
        except DataError as error:
            reader.refuse(named.name, error)
    reader.require_all()
    if not images:
        raise DataError(
            "picture",
            expected="at least one",
            got="an empty folder",
            remedy="Name a folder with at least one picture.",
        )
    return torch.cat(images)


def _given_image(picture: Picture, spec: DataSpec) -> Tensor:
    """Return a picture of the plan's size as one image, shape (1, ...)."""
    _check_size(picture, spec)
    values = picture.values
    num_channels = values.shape[0]
    num_plan_channels = spec.shape[0]
    if num_channels != num_plan_channels:
        channels = {1: "grey", 3: "rgb"}.get(num_plan_channels)
        if channels is None:
            raise DataError(
                "picture",
                expected=f"{num_plan_channels} channels",
                got=f"{num_channels} channels",
            )
        conversion = TransformSpec.model_validate({"channels": channels})
        values = with_channels(values, conversion, num_plan_channels)
    if picture.full is None:
        low, high = spec.range
    else:
        low, high = picture.full
    # Floating point has no bounds of its own, so that its values must be in the plan's range already.
    smallest = values.min()
    largest = values.max()
    if picture.full is None and (smallest < low or largest > high):
        raise DataError(
            "picture",
            expected=f"values within [{low:g}, {high:g}], or whole numbers",
            got=f"{smallest:g} to {largest:g}",
            remedy=(
                "Scale the images to this range, or save whole numbers of 8 or 16 bits, which are scaled "
                "here."
            ),
        )
    image = torch.from_numpy(mapped(values, low, high, spec.range))
    return image[None]


def read_mask(path: Path, spec: DataSpec) -> Tensor:
    """Read where an image shall be drawn: white pixels of a picture, or what is not 0 in the array `mask` of an npz.

    Returns:
        Bool, shape (H, W), or (D, H, W).

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not a mask, one of another size, or one that leaves nothing to draw.
    """
    if path.suffix.lower() == ".npz":
        mask = read_array(require_file(path, "a mask"), "mask", max_bytes=16 * spec.dim + 4096)
        if mask.dtype.kind not in "bui" or mask.shape != spec.shape[1:]:
            got = f"{mask.dtype} {mask.shape}"
            raise DataError(
                "mask",
                expected=f"bool or whole numbers, {spec.shape[1:]}",
                got=got,
                remedy=(
                    "Save the array mask as bool or whole numbers, one for each pixel of an image and without an axis "
                    "of channels: not 0 where the model draws."
                ),
            )
        is_drawn = mask != 0
    else:
        is_drawn = _mask_of_picture(path, spec)
    if not is_drawn.any():
        raise DataError(
            "mask",
            expected="pixels that are not black: there the model draws",
            got="only black pixels",
            remedy="Paint white what the model should draw.",
        )
    return torch.from_numpy(is_drawn)


def _mask_of_picture(path: Path, spec: DataSpec) -> Mask:
    reader = PictureReader(find_readable(path), "mask")
    pictures = [named.picture for named in reader]
    reader.require_all()
    if len(pictures) != 1:
        raise DataError(
            "mask",
            expected="one picture",
            got=str(len(pictures)),
            remedy="Name one picture as the mask.",
        )
    picture = pictures[0]
    _check_size(picture, spec)
    values = picture.values
    if picture.full is None:
        raise DataError(
            "mask",
            expected="whole numbers",
            got=str(values.dtype),
            remedy=(
                "Draw the mask in black and white, in the size of the pictures: white where the model "
                "draws."
            ),
        )
    low, high = picture.full
    first_channel = values[0]
    # Grey as three equal channels is what most programs save.
    has_equal_channels = values == values[:1]
    is_black_or_white = np.isin(first_channel, (low, high))
    if not has_equal_channels.all() or not is_black_or_white.all():
        raise DataError(
            "mask",
            expected="only black and white pixels",
            got="grey or coloured ones",
            remedy="Save the mask in black and white, as PNG: JPEG makes grey pixels at edges.",
        )
    return np.asarray(first_channel == high)


def _check_size(picture: Picture, spec: DataSpec) -> None:
    if picture.values.shape[1:] != spec.shape[1:]:
        expected = f"{' x '.join(map(str, spec.shape[1:]))} pixels, height by width"
        raise DataError(
            "picture",
            expected=expected,
            got=" x ".join(map(str, picture.values.shape[1:])),
            remedy="Scale or crop the pictures to this size.",
        )
