"""Samples on disk, marked as synthetic: a grid a person can look at, single pictures, volumes, or numbers.

Volumes are written as NIfTI files, in the orientation in which silos read them.
"""

import errno
import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from ddm.errors import SetupError, ShapeError
from ddm.io.files import write_atomic

if TYPE_CHECKING:
    from torch import Tensor

CELL_PIXELS = 64
GAP_PIXELS = 4
BACKGROUND = (24, 24, 28)
ENDINGS = (".png", ".npz", ".nii", ".nii.gz")
# Colours that people with colour blindness can tell apart (Okabe and Ito).
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
_EDGE_PIXELS = 2
_NIFTI_COMMENT = 6  # the code of an extension of plain text
# W, H and D point to the patient's left, back and top, as in DICOM; NIfTI's coordinates to the right, front and top.
_LEFT_POSTERIOR_SUPERIOR = np.diag([-1.0, -1.0, 1.0, 1.0])


def to_pixels(images: "Tensor", value_range: tuple[float, float] = (-1.0, 1.0)) -> np.ndarray:
    """Turn images, shape (N, C, H, W) with C 1 or 3, into uint8 (N, H, W, 3); of a volume, its middle slice.

    Args:
        images: the images whose values are clipped.
        value_range: the values that become 0 and 255.
    """
    if images.dim() == 5:  # (N, C, D, H, W)
        images = images[:, :, images.shape[2] // 2]
    low, high = value_range
    scaled = (images.clamp(low, high) - low) * (255 / (high - low))
    pixels: np.ndarray = scaled.round().byte().permute(0, 2, 3, 1).numpy()
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    return pixels


def check_pictures(shape: Sequence[int], subject: str = "samples") -> None:
    """Refuse samples that are not pictures.

    Args:
        shape: the shape of a sample.
        subject: what is refused.

    Raises:
        SetupError: neither 1 nor 3 channels of two or three dimensions.
    """
    if len(shape) not in (3, 4) or shape[0] not in (1, 3):
        got = f"shape {tuple(shape)}"
        if len(shape) in (3, 4):
            got = f"{shape[0]} channels"
        raise SetupError(
            subject,
            expected="samples of 1 or 3 channels",
            got=got,
            remedy="Write .npz instead, or take the numbers: Samples.images.",
        )


def pictures(images: "Tensor", value_range: tuple[float, float] = (-1.0, 1.0)) -> list[Image.Image]:
    """Turn images into pictures, one each; see `to_pixels`."""
    return [Image.fromarray(pixels) for pixels in to_pixels(images, value_range)]


def grid(
    images: Any,
    owners: Sequence[int] | None = None,
    columns: int | None = None,
    value_range: tuple[float, float] = (-1.0, 1.0),
) -> Image.Image:
    """Arrange images in a grid, square by default, enlarged to be readable.

    Args:
        images: an array or a tensor, as `to_pixels` takes them.
        owners: the expert of each image, shown by the colour of its edge.
        columns: the number of columns of the grid.
        value_range: the values of black and white.

    Raises:
        DataError: images that hold no real numbers.
        SetupError: images that are no pictures.
        ShapeError: no images, or not one owner for each.
        MathError: less than one column.
    """
    # Here, so that commands which write no picture load no torch.
    from ddm.io.array_input import real_tensor, whole_number

    tensor = real_tensor(images, "images")
    check_pictures(tensor.shape[1:], "images")
    if not len(tensor):
        raise ShapeError("images", expected="at least 1 image", got="0 images")
    if owners is not None and len(owners) != len(tensor):
        expected = f"one for each of {len(tensor)} images"
        raise ShapeError("owners", expected=expected, got=str(len(owners)))
    if columns is not None:
        whole_number(columns, "columns", least=1)
    pixels = to_pixels(tensor, value_range)
    columns = columns or ceil(sqrt(len(pixels)))
    rows = ceil(len(pixels) / columns)
    scale = max(1, CELL_PIXELS // max(pixels.shape[1:3]))
    height = pixels.shape[1] * scale
    width = pixels.shape[2] * scale
    row_pitch = height + GAP_PIXELS
    column_pitch = width + GAP_PIXELS
    size = (columns * column_pitch + GAP_PIXELS, rows * row_pitch + GAP_PIXELS)
    canvas = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(canvas)
    for index, picture in enumerate(pixels):
        row, column = divmod(index, columns)
        x = GAP_PIXELS + column * column_pitch
        y = GAP_PIXELS + row * row_pitch
        if owners is not None:
            colour = PALETTE[owners[index] % len(PALETTE)]
            # Both corners of a rectangle belong to it.
            last_x = x + width + _EDGE_PIXELS - 1
            last_y = y + height + _EDGE_PIXELS - 1
            pen.rectangle((x - _EDGE_PIXELS, y - _EDGE_PIXELS, last_x, last_y), fill=colour)
        cell = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
        canvas.paste(cell, (x, y))
    return canvas


@dataclass(frozen=True)
class _Marks:
    """What every file says about itself.

    Attributes:
        basic: what holds for all samples.
        classes: the requested class of each sample; empty where none was requested.
    """

    basic: dict[str, str]
    classes: Sequence[str]

    def of_all(self) -> dict[str, str]:
        """Return the marks of a file that holds all samples."""
        if not self.classes:
            return self.basic
        different_classes = dict.fromkeys(self.classes)
        return self.basic | {"Class": ", ".join(different_classes)}

    def of_sample(self, index: int) -> dict[str, str]:
        """Return the marks of a file that holds one sample."""
        if not self.classes:
            return self.basic
        return self.basic | {"Class": self.classes[index]}


def _marks(release: str, classes: Sequence[str]) -> _Marks:
    basic_marks = {"Synthetic": "true", "Software": "Archipelago"}
    if release:
        basic_marks["Release"] = release
    return _Marks(basic_marks, classes)


def encode_samples(
    images: "Tensor",
    owners: Sequence[int] | None,
    ending: str,
    release: str = "",
    classes: Sequence[str] = (),
    value_range: tuple[float, float] = (-1.0, 1.0),
) -> bytes:
    """Return the content of one file that holds all samples, marked as synthetic.

    Args:
        images: see `write_samples`, as for the others.
        owners: the expert of each sample; None for samples of one network.
        ending: one of `ENDINGS`.
        release: digest of a manifest.
        classes: the requested class of each sample.
        value_range: the data's.
    """
    images = images.clamp(*value_range)
    marks = _marks(release, classes)
    if ending == ".png":
        return _encode_png(grid(images, owners, value_range=value_range), marks.of_all())
    if ending == ".npz":
        return _encode_npz(images, owners, release, classes)
    return _encode_volumes(images, marks.of_all(), compress=ending == ".nii.gz")


def write_samples(
    images: "Tensor",
    owners: Sequence[int] | None,
    out: Path,
    release: str = "",
    classes: Sequence[str] = (),
    value_range: tuple[float, float] = (-1.0, 1.0),
    first_number: int = 0,
) -> str:
    """Write samples by the name of `out`, and mark every file as synthetic.

    Args:
        images: samples, in `value_range` but not clipped to it.
        owners: the expert of each sample; None for samples of one network.
        out: FILE.png, a grid; FILE.npz, numbers; FILE.nii or FILE.nii.gz, volumes; or a name without an ending, a
            folder with a PNG file, or for a volume a NIfTI file, for each sample.
        release: digest of the manifest of the release that they come from, if there is one.
        classes: the requested class of each sample, if classes were requested.
        value_range: the data's; black and white of pictures.
        first_number: number of the first sample; files of a folder are named by their samples' numbers.

    Returns:
        What was written, in words.

    Raises:
        SetupError: as `prepare_output` raises it.
    """
    prepare_output(out, images.shape[1:])
    ending = _ending(out)
    if ending:
        encoded = encode_samples(images, owners, ending, release, classes, value_range)
        write_atomic(out, encoded)
        if ending == ".png":
            return "a grid"
        if ending == ".npz":
            dtype = str(images.dtype).removeprefix("torch.")
            low, high = value_range
            return f"{dtype} images in [{low:g}, {high:g}]"
        return "volumes in one file"
    images = images.clamp(*value_range)
    marks = _marks(release, classes)
    if images.dim() == 5:
        for index in range(len(images)):
            volume = images[index : index + 1]
            encoded = _encode_volumes(volume, marks.of_sample(index), compress=True)
            write_atomic(out / f"{first_number + index:05d}.nii.gz", encoded)
        return f"{len(images)} NIfTI files"
    for index, picture in enumerate(pictures(images, value_range)):
        encoded = _encode_png(picture, marks.of_sample(index))
        write_atomic(out / f"{first_number + index:05d}.png", encoded)
    return f"{len(images)} PNG files"


def prepare_output(out: Path, shape: Sequence[int] | None = None) -> None:
    """Check the name of the file or folder for samples, and make its folder: before sampling, which may take long.

    Args:
        out: as in `write_samples`.
        shape: the shape of a sample; None where it is not known yet.

    Raises:
        SetupError: another ending, a folder with an ending, a file without one, NIfTI for images that are not volumes,
            or PNG for channels that no picture has.
        OSError: the folder cannot be made or written.
    """
    ending = _ending(out)
    if ending not in ("", *ENDINGS):
        expected = f"a name ending in {', '.join(ENDINGS)}, or a folder"
        raise SetupError(str(out), expected=expected, got=ending)
    expected = "a file, or a folder by a name without ending"
    if ending and out.is_dir():
        raise SetupError(str(out), expected=expected, got="a folder of that name")
    if not ending and out.is_file():
        raise SetupError(str(out), expected=expected, got="a file of that name")
    if shape:
        _check_shape(out, ending, shape)
    folder = out.parent if ending else out
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _check_shape(out: Path, ending: str, shape: Sequence[int]) -> None:
    is_flat = len(shape) == 3
    if is_flat and ending in (".nii", ".nii.gz"):
        raise SetupError(
            str(out), expected="volumes", got="flat images", remedy="Write .png or .npz instead."
        )
    # A folder gets PNG files of flat images, NIfTI files of volumes.
    is_png = ending == ".png" or (is_flat and not ending)
    if is_png:
        check_pictures(shape, str(out))


def _ending(out: Path) -> str:
    if out.name.endswith(".nii.gz"):
        return ".nii.gz"
    return out.suffix


def _encode_png(picture: Image.Image, marks: dict[str, str]) -> bytes:
    text = PngInfo()
    for key, value in marks.items():
        # A plain text chunk is read as Latin-1, an international one as UTF-8.
        if value.isascii():
            text.add_text(key, value)
        else:
            text.add_itxt(key, value)
    encoded = BytesIO()
    picture.save(encoded, format="PNG", pnginfo=text)
    return encoded.getvalue()


def _encode_npz(
    images: "Tensor", owners: Sequence[int] | None, release: str, classes: Sequence[str]
) -> bytes:
    arrays = {
        "images": images.numpy(),
        "synthetic": np.array(True),
        "release": np.array(release),
    }
    if owners is not None:
        arrays["expert"] = np.asarray(owners, dtype=np.int64)
    if classes:
        arrays["class"] = np.array(classes)
    archive = BytesIO()
    np.savez(archive, **arrays)  # type: ignore[arg-type]
    return archive.getvalue()


def _encode_volumes(volumes: "Tensor", marks: dict[str, str], *, compress: bool) -> bytes:
    """Return volumes as one NIfTI-1 file, float32, voxels of 1 without a unit.

    Args:
        volumes: shape (N, C, D, H, W); the file's axes are W, H, D, N and C, the last two where longer than 1.
        marks: what the file says about itself; `Synthetic` and `Release` are in its field `descrip` too.
        compress: for a name that ends in .nii.gz.
    """
    import nibabel

    array = volumes.permute(4, 3, 2, 0, 1).contiguous().numpy()
    single_axes = tuple(axis for axis in (3, 4) if array.shape[axis] == 1)
    image = nibabel.Nifti1Image(array.squeeze(single_axes), _LEFT_POSTERIOR_SUPERIOR)
    image.header["descrip"] = f"synthetic {marks.get('Release', '')}".strip().encode()
    comment = json.dumps(marks, sort_keys=True).encode()
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension(_NIFTI_COMMENT, comment))
    data: bytes = image.to_bytes()
    if compress:
        # Without the time, so that the same samples give the same file.
        data = gzip.compress(data, mtime=0)
    return data
