"""DICOM files made for tests, in every transfer syntax that something here can write."""

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    CTImageStorage,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    generate_uid,
)


def waves(shape: tuple[int, ...] = (48, 40), high: int = 4095, dtype: Any = np.uint16) -> np.ndarray:
    """Return smooth values from 0 to `high` that differ in every direction."""
    grids = np.meshgrid(*(np.linspace(0, 2 + axis, side) for axis, side in enumerate(shape)), indexing="ij")
    values = sum(np.sin(grid + number) * (number + 1) for number, grid in enumerate(grids))
    values = values - values.min()
    return np.round(values / values.max() * high).astype(dtype)


def tags_of(values: np.ndarray, *, bits: int = 12, **others: Any) -> FileDataset:
    """Return an image of greys (H, W), colours (H, W, 3) or frames (N, H, W), uncompressed."""
    meta = FileMetaDataset()
    kind = others.pop("SOPClassUID", CTImageStorage)
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, kind
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["1"])
    tags = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    tags.SOPClassUID, tags.SOPInstanceUID = kind, meta.MediaStorageSOPInstanceUID
    tags.PatientID, tags.PatientName, tags.Modality = "MRN0017", "DOE^JOHN", "CT"
    colours = values.ndim == 3 and values.shape[-1] == 3
    height, width = values.shape[-3:-1] if colours else values.shape[-2:]
    tags.Rows, tags.Columns, tags.SamplesPerPixel = height, width, 3 if colours else 1
    tags.PhotometricInterpretation = "RGB" if colours else "MONOCHROME2"
    if colours:
        tags.PlanarConfiguration = 0
    elif values.ndim == 3:
        tags.NumberOfFrames = len(values)
    tags.BitsAllocated, tags.BitsStored, tags.HighBit = 8 * values.itemsize, bits, bits - 1
    tags.PixelRepresentation = int(values.dtype.kind == "i")
    tags.PixelData = values.tobytes()
    for name, value in others.items():
        setattr(tags, name, value)
    return tags


def write(tags: FileDataset, path: Path) -> Path:
    """Write a file with its preamble."""
    tags.save_as(path, enforce_file_format=True)
    return path


def packed(tags: FileDataset, syntax: UID, path: Path) -> Path:
    """Write a file whose pixels are compressed by pydicom's encoders."""
    tags.compress(syntax, generate_instance_uid=False)
    return write(tags, path)


def baseline(path: Path) -> Path:
    """Write 8-bit greys in baseline JPEG, through Pillow."""
    values = waves(high=255, dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(values).save(encoded, "JPEG", quality=95)
    tags = tags_of(values, bits=8)
    tags.PixelData = encapsulate([encoded.getvalue()])
    tags["PixelData"].is_undefined_length = True
    tags.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    return write(tags, path)


def through_gdcm(source: Path, path: Path, kind: str) -> Path:
    """Write a file again with its pixels in a transfer syntax that GDCM names."""
    import gdcm

    reader, writer, change = gdcm.ImageReader(), gdcm.ImageWriter(), gdcm.ImageChangeTransferSyntax()
    reader.SetFileName(str(source))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, kind)))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    writer.SetFileName(str(path))
    assert writer.Write()
    return path


def big_endian(path: Path) -> Path:
    """Write a file in explicit big endian."""
    tags = tags_of(waves())
    tags.PixelData = waves().astype(">u2").tobytes()
    tags.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRBigEndian
    pydicom.dcmwrite(path, tags, enforce_file_format=True)
    return path


def bare(path: Path, *, implicit: bool) -> Path:
    """Write a file without preamble and without file meta information."""
    tags = Dataset(tags_of(waves()))
    pydicom.dcmwrite(path, tags, implicit_vr=implicit, little_endian=True, enforce_file_format=False)
    return path


def enhanced(values: np.ndarray, places: list[float], path: Path, body_part: str = "CHEST") -> Path:
    """Write frames (N, H, W) that lie along the body's axis, each at its place in mm."""
    tags = tags_of(values, SOPClassUID=EnhancedCTImageStorage, BodyPartExamined=body_part)
    shared, frames = Dataset(), []
    measures, orientation, rescale = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [0.5, 0.75], 2.0
    orientation.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    rescale.RescaleSlope, rescale.RescaleIntercept, rescale.RescaleType = 2, -1000, "HU"
    shared.PixelMeasuresSequence, shared.PlaneOrientationSequence = Sequence([measures]), Sequence([orientation])
    shared.PixelValueTransformationSequence = Sequence([rescale])
    for place in places:
        frame, position = Dataset(), Dataset()
        position.ImagePositionPatient = [10, 20, place]
        frame.PlanePositionSequence = Sequence([position])
        frames.append(frame)
    tags.SharedFunctionalGroupsSequence, tags.PerFrameFunctionalGroupsSequence = Sequence([shared]), Sequence(frames)
    return write(tags, path)


def inflating(path: Path, num_bytes: int) -> Path:
    """Write a deflated file of a few kilobytes whose data set inflates to so many zeros."""
    small = io.BytesIO()
    tags = tags_of(waves((8, 8)))
    tags.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    tags.save_as(small, enforce_file_format=True)
    head = small.getvalue()
    meta_bytes = 132 + 12 + int.from_bytes(head[140:144], "little")
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block, body = bytes(1 << 20), bytearray()
    for _ in range(num_bytes >> 20):
        body += packer.compress(block)
    path.write_bytes(head[:meta_bytes] + bytes(body) + packer.flush())
    return path
