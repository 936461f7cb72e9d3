"""A hospital's exports with a patient's name, number and birth date wherever a file has room for them.

The pixels are made. Every file says whose it is in each place that its format knows; a few have places that no picture
may keep (overlays, thumbnails), which wait for a person.
"""

import csv
import io
import struct
from pathlib import Path

import nibabel
import numpy as np
import pydicom
from PIL import Image, PngImagePlugin
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from tests.support.canary import BIRTH, FOREIGN, NAME, NUMBER, TEXTS
from tests.support.dicom_files import tags_of, write

ALL = " / ".join(TEXTS)
_DESCRIPTION = 0x010E
_ARTIST = 0x013B
_COPYRIGHT = 0x8298
_XP_COMMENT = 0x9C9C
_EXIF = 0x8769
_USER_COMMENT = 0x9286
_PRIVATE_TIFF = 65000


def export_tree(folder: Path, num: int, seed: int) -> Path:
    """Write DICOM files with their patients, below folders and under names that tell them; each patient has two."""
    for number in range(num):
        place = folder / f"{NAME} {BIRTH}" / f"{FOREIGN}_{number // 2}"
        place.mkdir(parents=True, exist_ok=True)
        write_dicom(place / f"{NUMBER}-{number}.dcm", pixels(seed + number), number // 2)
    write_with_overlay(folder / f"{NUMBER} overlay.dcm", pixels(seed))
    write_with_icon(folder / f"{NUMBER} icon.dcm", pixels(seed))
    (folder / f"{NAME}.txt").write_text(ALL)
    return folder


def export_table(folder: Path, num: int, seed: int) -> Path:
    """Write pictures of several formats and a table with patients, a label that no plan asks for, and more columns."""
    writers = (write_png, write_jpeg, write_tiff, write_nifti)
    rows = []
    for number in range(num):
        place = folder / f"{NAME}_{number // 2}"
        place.mkdir(parents=True, exist_ok=True)
        write_picture = writers[number % len(writers)]
        path = write_picture(place / f"{NUMBER}_{BIRTH}_{number}", pixels(seed + number))
        rows.append((path, number // 2))
    rows.append((write_with_thumbnail(folder / f"{NUMBER}_thumbnail", pixels(seed)), 0))
    table = folder / "export.csv"
    with table.open("w", newline="", encoding="utf-8") as handle:
        written = csv.writer(handle)
        written.writerow(("path", "patient", "label", "patient name", "born", NAME))
        for path, patient in rows:
            owner = f"{NAME} {NUMBER}-{patient}"
            written.writerow(
                (path.relative_to(folder), owner, f"{FOREIGN} {NUMBER}", FOREIGN, BIRTH, ALL)
            )
    return table


def pixels(seed: int) -> np.ndarray:
    """Return greys (12, 10) with a bright half."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(40, 200, 10)[None]
    if rng.random() >= 0.5:
        ramp = ramp[:, ::-1]
    return np.clip(ramp + 15 * rng.standard_normal((12, 10)), 0, 255).astype(np.uint8)


def write_dicom(path: Path, values: np.ndarray, patient: int) -> Path:
    """Write a DICOM file whose tags, sequences and private tags name the patient."""
    return write(_tags_that_name_the_patient(values, patient), path)


def _tags_that_name_the_patient(
    values: np.ndarray, patient: int = 0
) -> pydicom.dataset.FileDataset:
    tags = tags_of(values.astype(np.uint16) * 16)
    tags.SpecificCharacterSet = "ISO_IR 100"
    tags.PatientName = NAME
    tags.PatientID = f"{NUMBER}-{patient}"
    tags.PatientBirthDate = BIRTH
    tags.OtherPatientIDs = [NUMBER, NAME]
    tags.OtherPatientNames = FOREIGN
    tags.PatientComments = ALL
    tags.ReferringPhysicianName = FOREIGN
    tags.InstitutionName = NAME
    tags.StudyDescription = ALL
    tags.SeriesDescription = NAME
    tags.ProtocolName = NAME
    tags.AccessionNumber = NUMBER
    tags.BodyPartExamined = "CHEST"
    inner = Dataset()
    inner.PatientID = NUMBER
    inner.IssuerOfPatientID = NAME
    tags.OtherPatientIDsSequence = Sequence([inner])
    block = tags.private_block(0x0099, NAME, create=True)
    block.add_new(0x01, "LO", NAME)
    block.add_new(0x02, "OB", ALL.encode("utf-8"))
    block.add_new(0x03, "UT", ALL)
    tags.preamble = ALL.encode("latin-1").ljust(128, b"\0")[:128]
    return tags


def write_with_overlay(path: Path, values: np.ndarray) -> Path:
    """Write a DICOM file with an overlay, whose bits spell the texts."""
    tags = _tags_that_name_the_patient(values)
    bits = ALL.encode("utf-8")
    tags.add_new((0x6000, 0x0010), "US", 8)
    tags.add_new((0x6000, 0x0011), "US", len(bits))
    tags.add_new((0x6000, 0x0022), "LO", NAME)
    tags.add_new((0x6000, 0x0040), "CS", "G")
    tags.add_new((0x6000, 0x0050), "SS", [1, 1])
    tags.add_new((0x6000, 0x0100), "US", 1)
    tags.add_new((0x6000, 0x0102), "US", 0)
    tags.add_new((0x6000, 0x1500), "LO", NUMBER)
    tags.add_new((0x6000, 0x3000), "OW", bits + b"\0" * (len(bits) % 2))
    return write(tags, path)


def write_with_icon(path: Path, values: np.ndarray) -> Path:
    """Write a DICOM file with an icon, whose pixels spell the texts."""
    tags = _tags_that_name_the_patient(values)
    icon = Dataset()
    spelt = ALL.encode("utf-8").ljust(64, b"\0")[:64]
    icon.SamplesPerPixel = 1
    icon.PhotometricInterpretation = "MONOCHROME2"
    icon.Rows = 8
    icon.Columns = 8
    icon.BitsAllocated = 8
    icon.BitsStored = 8
    icon.HighBit = 7
    icon.PixelRepresentation = 0
    icon.PixelData = spelt
    tags.IconImageSequence = Sequence([icon])
    return write(tags, path)


def _exif() -> Image.Exif:
    exif = Image.Exif()
    exif[_DESCRIPTION] = ALL
    exif[_ARTIST] = NAME
    exif[_COPYRIGHT] = FOREIGN
    exif[_XP_COMMENT] = ALL.encode("utf-16-le")
    exif.get_ifd(_EXIF)[_USER_COMMENT] = b"ASCII\0\0\0" + ALL.encode("latin-1")
    return exif


def write_png(path: Path, values: np.ndarray) -> Path:
    """Write a PNG with the texts in text chunks, packed and not, and in EXIF."""
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Author", f"{NAME} {NUMBER} {BIRTH}")
    texts.add_text("Comment", ALL, zip=True)
    texts.add_itxt("Title", ALL, lang="de", tkey=FOREIGN, zip=True)
    target = path.with_name(path.name + ".png")
    Image.fromarray(values).save(target, pnginfo=texts, exif=_exif())
    return target


def write_jpeg(path: Path, values: np.ndarray) -> Path:
    """Write a JPEG with the texts in EXIF and in its comment."""
    target = path.with_name(path.name + ".jpg")
    Image.fromarray(values).save(target, exif=_exif(), comment=ALL.encode("utf-8"), quality=95)
    return target


def write_tiff(path: Path, values: np.ndarray) -> Path:
    """Write a TIFF with the texts in its tags, one of them private."""
    target = path.with_name(path.name + ".tif")
    own = {_DESCRIPTION: ALL, _ARTIST: NAME, _PRIVATE_TIFF: f"{NAME} {NUMBER} {BIRTH}"}
    Image.fromarray(values).save(target, tiffinfo=own)
    return target


def write_nifti(path: Path, values: np.ndarray) -> Path:
    """Write one slice as NIfTI, with the texts in its header and in extensions."""
    made = nibabel.Nifti1Image(values.T[:, ::-1, None].copy(), np.eye(4))
    made.header["descrip"] = NAME.encode()
    made.header["aux_file"] = NUMBER.encode()
    made.header["db_name"] = BIRTH.encode()
    made.header["intent_name"] = NAME.encode()
    for code, content in (
        ("comment", ALL.encode("utf-8")),
        ("dicom", _dicom_tags_without_pixels()),
    ):
        made.header.extensions.append(nibabel.nifti1.Nifti1Extension(code, content))
    target = path.with_name(path.name + ".nii.gz")
    nibabel.save(made, target)
    return target


def _dicom_tags_without_pixels() -> bytes:
    tags = Dataset()
    packed = io.BytesIO()
    tags.PatientName = NAME
    tags.PatientID = NUMBER
    pydicom.dcmwrite(packed, tags, implicit_vr=True, little_endian=True, enforce_file_format=False)
    return packed.getvalue()


def write_with_thumbnail(path: Path, values: np.ndarray) -> Path:
    """Write a JPEG whose EXIF holds a thumbnail, in the comment of which the texts stand."""
    whole = io.BytesIO()
    small = io.BytesIO()
    Image.fromarray(values).save(whole, "JPEG")
    Image.fromarray(values).save(small, "JPEG", comment=ALL.encode("utf-8"))
    size = len(small.getvalue())
    data = whole.getvalue()
    directory = struct.pack("<HHHIIHHIII", 2, 0x0201, 4, 1, 44, 0x0202, 4, 1, size, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IHI", 8, 0, 14) + directory + small.getvalue()
    target = path.with_name(path.name + ".jpg")
    target.write_bytes(data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:])
    return target
