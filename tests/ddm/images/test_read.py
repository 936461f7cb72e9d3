"""Pictures at a path, for people and for programs that read public images: all of them, and why one cannot be read."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ddm.images.read
from ddm.errors import DataError, MissingFileError
from ddm.images import ImageError, Reason, read_pictures
from ddm.images.picture import DecodedPicture
from ddm.images.samples import open_image_set, read_given_images, read_mask
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import FullRange, Slices, TransformSpec
from tests.support.case import case
from tests.support.errors import has_subject

DATA = DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0))
SPEC = TransformSpec(channels="grey", range=FullRange(), storage="uint8")


def pixels(seed: int, size: tuple[int, ...] = (8, 8)) -> np.ndarray:
    """Grey levels from black to white."""
    array = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    array.flat[0] = 0
    array.flat[1] = 255
    return array


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def folder_of(path: Path, num: int) -> Path:
    for number in range(num):
        save(path / f"p{number:03}.png", pixels(number))
    return path


def values_and_errors(path: Path, **how: object) -> tuple[list[np.ndarray], list[Reason]]:
    values = []
    errors = []
    for picture in read_pictures(path, **how):  # type: ignore[arg-type]
        if isinstance(picture, ImageError):
            errors.append(picture.reason)
        else:
            assert isinstance(picture, DecodedPicture)
            values.append(picture.values)
    return values, errors


def test_pictures_of_a_folder_come_in_order_and_go_on_after_a_bad_file(tmp_path: Path) -> None:
    folder_of(tmp_path, 3)
    save(tmp_path / "deep" / "er" / "z.png", pixels(9))
    (tmp_path / "p001.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    (tmp_path / "p0015.png").write_bytes(b"")
    for clutter in ("Thumbs.db", "README.txt", ".DS_Store", "._p000.png", "LICENSE"):
        (tmp_path / clutter).write_bytes(b"clutter")
    values, errors = values_and_errors(tmp_path)
    for actual, seed in zip(values, (0, 2, 9), strict=True):
        np.testing.assert_array_equal(actual, pixels(seed)[None])
    assert len(errors) == 2
    assert Reason.EMPTY in errors


def test_one_file_is_read_whatever_it_holds(tmp_path: Path) -> None:
    array = np.stack([pixels(seed) for seed in range(4)])
    save(tmp_path / "one.png", pixels(7))
    np.save(tmp_path / "rows.npy", array)
    np.savez(tmp_path / "rows.npz", images=array)
    pages = [Image.fromarray(page) for page in array]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    for name, expected in {
        "one.png": pixels(7)[None],
        "rows.npy": array,
        "rows.npz": array,
        "pages.tif": array,
    }.items():
        with case(name):
            values, errors = values_and_errors(tmp_path / name)
            assert errors == []
            np.testing.assert_array_equal(np.concatenate(values), expected)


def test_table_says_what_belongs_to_pictures_and_missing_files_are_errors(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 2)
    rows = [
        "path,label,patient,split,caption",
        "img/p000.png,Cat,7,train,a cat",
        "img/gone.png,,,,",
        "img/p001.png,,,,",
    ]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    first, gone, second = read_pictures(tmp_path / "table.csv")
    assert isinstance(first, DecodedPicture)
    assert (first.label, first.patient, first.split, first.caption) == (
        "Cat",
        "7",
        "train",
        "a cat",
    )
    assert isinstance(gone, ImageError)
    assert gone.reason is Reason.MISSING
    assert isinstance(second, DecodedPicture)
    assert second.label is None


def test_what_is_no_data_set_is_an_error_and_nothing_at_a_path_is_raised(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        list(read_pictures(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert list(read_pictures(tmp_path / "empty")) == []
    for name, content in {
        "book.xlsx": b"PK\x03\x04",
        "other.csv": b"a,b\n1,2\n",
        "text.png": b"no picture",
        "broken.npz": b"PK\x03\x04 cut",
        "broken.npy": b"\x93NUMPY\x01\x00 cut",
        "objects.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "broken.parquet": b"PAR1",
        "packed.gz": gzip.compress(b"text"),
        "packed.zip": b"PK\x03\x04",
        "empty.dcm": b"",
        "short.nii": b"\x5c\x01\x00\x00",
    }.items():
        (tmp_path / name).write_bytes(content)
        with case(name):
            errors = list(read_pictures(tmp_path / name))
            assert errors
            assert all(isinstance(error, ImageError) for error in errors), errors
    with case("a file that the operating system does not read"):
        [picture] = read_pictures("/proc/self/mem")
        assert isinstance(picture, ImageError)
        with pytest.raises(DataError, check=has_subject("data")):
            open_image_set(Path("/proc/self/mem"), DATA, SPEC)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert all(isinstance(item, ImageError) for item in read_pictures(fifo))


def test_importing_the_package_loads_neither_torch_nor_decoders() -> None:
    code = (
        "import sys, ddm.images; heavy = ('torch', 'numpy', 'PIL', 'pydicom', 'pydantic', 'pyarrow');"
        "assert not [name for name in heavy if name in sys.modules];"
        "from ddm.images import read_pictures; assert 'torch' not in sys.modules and 'pydicom' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_processes_and_this_process_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "public", 6)
    save(tmp_path / "public" / "colour.png", pixels(50, (8, 12, 3)))
    pages = [Image.fromarray(pixels(seed)) for seed in (60, 61)]
    pages[0].save(tmp_path / "public" / "pages.tif", save_all=True, append_images=pages[1:])
    (tmp_path / "public" / "notes.rtf").write_text("notes")
    (tmp_path / "public" / "model.bin").write_bytes(b"weights")
    here = open_image_set(tmp_path / "public", DATA, SPEC)
    monkeypatch.setattr(ddm.images.read, "_FEW_FILES", 0)
    there = open_image_set(tmp_path / "public", DATA, SPEC)
    assert len(here) == len(there) == 9
    assert np.array_equal(here.read(), there.read())
    assert here.files == there.files
    assert (
        here.remarks
        == there.remarks
        == ("2 files that hold no image were skipped: model.bin, notes.rtf.",)
    )


def test_bad_public_images_are_all_named_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = folder_of(tmp_path / "public", 12)
    (public / "p003.png").write_bytes(b"")
    (public / "p007.png").write_bytes((public / "p006.png").read_bytes()[:70])
    np.save(public / "features.npy", np.zeros(3))
    (public / "features.npy").rename(public / "p008.png")
    save(public / "sub" / "floats.tif", pixels(1).astype(np.float32))
    for few in (64, 0):
        monkeypatch.setattr(ddm.images.read, "_FEW_FILES", few)
        with case(few), pytest.raises(DataError) as caught:
            open_image_set(public, DATA, SPEC, subject="public images")
        assert caught.value.subject == "public images"
        for name in (
            "p003.png: empty file",
            "p007.png: ",
            "p008.png: ",
            f"sub{os.sep}floats.tif: values: expected a type with a full range",
        ):
            assert name in str(caught.value.got)
        assert "p006" not in str(caught.value.got)
    for number in range(12):
        (public / f"p{number:03}.png").write_bytes(b"")
    with pytest.raises(DataError, check=has_subject("images")):
        open_image_set(public, DATA, SPEC)


def test_names_that_would_drive_a_terminal_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\n.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        open_image_set(tmp_path, DATA, SPEC)
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_classes_of_a_table_follow_their_pictures_and_their_slices(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "volumes.npz",
        images=np.random.default_rng(0).random((3, 1, 4, 8, 8)),
        labels=[2, 0, 1],
    )
    sliced = TransformSpec(slices=Slices(count=2))
    assert open_image_set(tmp_path / "volumes.npz", DATA, sliced).column("labels").tolist() == [
        2,
        2,
        0,
        0,
        1,
        1,
    ]
    folder_of(tmp_path / "img", 3)
    (tmp_path / "t.csv").write_text(
        "path,label\nimg/p002.png,two\nimg/p000.png,zero\nimg/p001.png,\n"
    )
    images = open_image_set(tmp_path / "t.csv", DATA, SPEC)
    assert np.array_equal(images.read()[0], open_image_set(tmp_path / "img", DATA, SPEC).read()[2])
    with pytest.raises(DataError, check=has_subject("column labels")):
        images.column("labels")
    (tmp_path / "t.csv").write_text("path,label\nimg/p002.png,two\nimg/p000.png,zero\n")
    assert open_image_set(tmp_path / "t.csv", DATA, SPEC).column("labels").tolist() == [
        "two",
        "zero",
    ]


def test_range_and_enlargement_of_public_images_are_remarked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for dtype, largest, expected in [
        (np.float32, 1.0, "fill 50% of the declared range -1 to 1: 0 to 1"),
        (np.uint16, 4095, "fill 6% of the range of their type, 0 to 65535: 0 to 4095"),
        (np.uint8, 255, None),
    ]:
        array = (rng.random((30, 1, 8, 8)) * largest).astype(dtype)
        array[:, 0, 0, 0] = 0
        array[:, 0, 0, 1] = largest
        np.savez(tmp_path / "a.npz", images=array)
        images = open_image_set(tmp_path / "a.npz", DATA, None)
        remark_text = images.range_remarks(images.read())
        with case(np.dtype(dtype).name):
            assert len(remark_text) == (expected is not None)
            assert expected is None or expected in remark_text[0]
    dark = (rng.random((30, 8, 8)) * 4096).astype(np.uint16)
    np.savez(tmp_path / "a.npz", images=dark)
    images = open_image_set(tmp_path / "a.npz", DATA, SPEC)
    assert "of the plan's range -1 to 1" in images.range_remarks(images.read())[0]
    assert images.remarks == ()
    save(tmp_path / "small" / "a.png", pixels(0, (3, 4)))
    [remark] = open_image_set(tmp_path / "small", DATA, SPEC).remarks
    assert "1 of 1 images are enlarged more than 2 times" in remark


def test_given_images_are_decoded_as_all_others_and_keep_the_values_of_their_type(
    tmp_path: Path,
) -> None:
    array = pixels(3)
    expected = array.astype(np.float32) / 255 * 2 - 1
    save(tmp_path / "grey.png", array)
    save(tmp_path / "colour.png", np.repeat(array[..., None], 3, -1))
    Image.fromarray(array).save(tmp_path / "grey.tif")
    Image.fromarray(array.astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    np.savez(tmp_path / "array.npz", images=array[None])
    for name in ("grey.png", "colour.png", "grey.tif", "sixteen.png", "array.npz"):
        with case(name):
            np.testing.assert_allclose(
                read_given_images(tmp_path / name, DATA)[0, 0], expected, atol=1e-6
            )
    save(tmp_path / "large.png", pixels(0, (9, 8)))
    (tmp_path / "text.png").write_text("text")
    for name in ("large.png", "text.png"):
        with case(name), pytest.raises(DataError, match=name):
            read_given_images(tmp_path / name, DATA)
    one_bit = Image.fromarray(array > 127)
    one_bit.save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png", DATA), array > 127)
