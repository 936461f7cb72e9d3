"""Images from npz, npy, folders and Parquet: the same values from all of them, by rows and blocks, or a refusal."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ddm.errors import DataError, MissingFileError
from ddm.images.array_files import open_arrays, open_images, open_latents, read_images
from ddm.images.rows import Images, SelectedImages, select
from ddm.protocol.data import DataSpec
from tests.support.case import case
from tests.support.errors import has_subject

SPEC = DataSpec(shape=(2, 3, 4), range=(-1.0, 1.0))
BYTES = np.random.default_rng(0).integers(0, 256, (50, 2, 3, 4), dtype=np.uint8)
SHORTS = np.random.default_rng(2).integers(0, 65536, (50, 2, 3, 4), dtype=np.uint16)
FLOATS = np.random.default_rng(1).uniform(-1, 1, (50, 2, 3, 4)).astype(np.float16)


def npz(path: Path, array: np.ndarray) -> Path:
    np.savez(path / "a.npz", images=array)
    return path / "a.npz"


def packed(path: Path, array: np.ndarray) -> Path:
    np.savez_compressed(path / "b.npz", images=array)
    return path / "b.npz"


def npy(path: Path, array: np.ndarray) -> Path:
    np.save(path / "c.npy", array)
    return path / "c.npy"


def by_columns(path: Path, array: np.ndarray) -> Path:
    np.savez(path / "d.npz", images=np.asfortranarray(array))
    return path / "d.npz"


def npy_by_columns(path: Path, array: np.ndarray) -> Path:
    np.save(path / "e.npy", np.asfortranarray(array))
    return path / "e.npy"


def packed_by_columns(path: Path, array: np.ndarray) -> Path:
    np.savez_compressed(path / "f.npz", images=np.asfortranarray(array))
    return path / "f.npz"


def big_endian(path: Path, array: np.ndarray) -> Path:
    np.save(path / "g.npy", array.astype(array.dtype.newbyteorder(">")))
    return path / "g.npy"


def packed_big_endian(path: Path, array: np.ndarray) -> Path:
    np.savez_compressed(path / "h.npz", images=array.astype(array.dtype.newbyteorder(">")))
    return path / "h.npz"


def folder(path: Path, array: np.ndarray) -> Path:
    (path / "whole").mkdir(exist_ok=True)
    np.save(path / "whole" / "images.npy", array)
    return path / "whole"


def parts(path: Path, array: np.ndarray) -> Path:
    (path / "parts").mkdir(exist_ok=True)
    for k, part in enumerate(np.array_split(array, 3)):
        np.save(path / "parts" / f"images-{k:03}.npy", part)
    return path / "parts"


def tensors(path: Path, array: np.ndarray) -> Path:
    table = pa.table(
        {"image": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))}
    )
    pq.write_table(table, path / "tensors.parquet", row_group_size=20)
    return path / "tensors.parquet"


def nested(path: Path, array: np.ndarray) -> Path:
    kind = pa.list_(pa.list_(pa.list_(pa.from_numpy_dtype(array.dtype))))
    (path / "nested").mkdir(exist_ok=True)
    for k, part in enumerate(np.array_split(array, 2)):
        pq.write_table(
            pa.table({"image": pa.array(part.tolist(), kind)}), path / "nested" / f"{k}.parquet"
        )
    return path / "nested"


def flat(path: Path, array: np.ndarray) -> Path:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), int(np.prod(array.shape[1:])))
    pq.write_table(pa.table({"image": rows}), path / "flat.parquet")
    return path / "flat.parquet"


SOURCES: list[Callable[[Path, np.ndarray], Path]] = [
    *(npz, packed, npy, by_columns, folder, parts, tensors, nested, flat),
    *(npy_by_columns, packed_by_columns, big_endian, packed_big_endian),
]


def opened(path: Path, kept: Path) -> Images:
    return open_images(open_arrays(path), SPEC, kept)


def test_every_source_gives_the_same_images_whole_by_blocks_and_by_rows(tmp_path: Path) -> None:
    rows = torch.tensor([49, 0, 7, 7, 31])
    for array in (BYTES, SHORTS, FLOATS):
        expected = torch.from_numpy(
            array if array is FLOATS else array / (np.iinfo(array.dtype).max / 2) - 1
        ).float()
        for make in SOURCES:
            with case(source=make.__name__, dtype=str(array.dtype)):
                path = make(tmp_path, array)
                whole = read_images(path, SPEC)
                lazy = opened(path, tmp_path / "kept")
                assert whole.shape == lazy.shape and len(lazy) == 50
                assert torch.allclose(whole, expected, atol=1e-6)
                assert torch.equal(lazy[:], whole) and torch.equal(lazy[13:31], whole[13:31])
                assert torch.equal(lazy[rows], whole[rows])
                chosen = SelectedImages(lazy, torch.tensor([3, 30, 31, 32, 49]))
                assert torch.equal(chosen[1:4], whole[30:33]) and torch.equal(
                    chosen[torch.tensor([4, 0])], whole[[49, 3]]
                )


def test_what_is_compressed_is_unpacked_once_in_its_own_type_and_again_when_it_changed(
    tmp_path: Path,
) -> None:
    path = packed(tmp_path, BYTES)
    kept = tmp_path / "kept"
    opened(path, kept)
    (made,) = kept.glob("unpacked-*")
    assert np.array_equal(np.load(made), BYTES) and made.stat().st_mode & 0o077 == 0
    before = made.stat().st_mtime_ns
    opened(path, kept)
    assert [(file, file.stat().st_mtime_ns) for file in kept.glob("unpacked-*")] == [(made, before)]
    packed(tmp_path, BYTES[:40])
    assert (
        torch.equal(opened(path, kept)[:], read_images(path, SPEC))
        and len(list(kept.glob("unpacked-*"))) == 1
    )
    opened(npz(tmp_path, BYTES), tmp_path / "none")
    assert not (tmp_path / "none").exists()  # what is not compressed is read where it lies


def test_row_that_is_out_of_range_or_not_finite_is_named(tmp_path: Path) -> None:
    for value, said in (
        (np.nan, "NaN or infinite values in row 42"),
        (1.5, "outside this range in row 42"),
    ):
        array = FLOATS.copy()
        array[42, 1, 2, 3] = value
        for make in SOURCES:
            with case(source=make.__name__, value=value):
                lazy = opened(make(tmp_path, array), tmp_path / "kept")
                for rows in (slice(0, 50), slice(40, 44), torch.tensor([1, 42, 3])):
                    with pytest.raises(DataError, match=said):
                        lazy[rows]
                assert len(lazy[:42]) == 42


def test_header_of_another_shape_or_type_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    last = np.moveaxis(BYTES, 1, -1)
    for array, said in (
        (BYTES[:, :, :2], "image shape"),
        (BYTES.astype(np.int32), "uint8 or uint16"),
        (np.zeros((50, 2, 3, 4), bool), "uint8 or uint16|Parquet|tensors nor lists"),
        (last, "image shape"),
    ):
        for make in (npz, packed, npy, folder, parts, nested):
            with case(source=make.__name__, shape=array.shape, dtype=str(array.dtype)):
                with pytest.raises(DataError, match=said) as caught:
                    opened(make(tmp_path, array), tmp_path / "kept")
                assert ("moveaxis" in caught.value.remedy) == (array is last)
    assert not (tmp_path / "kept").exists()


def test_file_that_is_cut_short_holds_objects_or_says_more_than_it_has_is_refused(
    tmp_path: Path,
) -> None:
    whole = npy(tmp_path, BYTES).read_bytes()
    huge = whole.replace(b"(50, 2, 3, 4)", b"(9" + b"0" * 8 + b", 2, 3, 4)").replace(
        b" " * 8 + b"\n", b"\n"
    )
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}] * 3, dtype=object))
    objects = (tmp_path / "objects.npy").read_bytes()
    lied = b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + b" " * 100
    for why, data in {
        "cut": whole[:-1],
        "huge": huge,
        "objects": objects,
        "header": lied,
        "empty": b"",
    }.items():
        with case(why=why), pytest.raises(DataError):
            (tmp_path / "x.npy").write_bytes(data)
            open_arrays(tmp_path / "x.npy")
    table = tensors(tmp_path, BYTES)
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(DataError, check=has_subject("data file")):
        open_arrays(table)
    for missing in ("none.npz", "none.npy", "none.parquet"):
        with pytest.raises(MissingFileError):
            open_arrays(tmp_path / missing)
    with pytest.raises(DataError, check=has_subject("data folder")):
        (tmp_path / "nothing").mkdir()
        open_arrays(tmp_path / "nothing")


def test_file_that_is_cut_while_it_is_open_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    path = npy(tmp_path, FLOATS)
    lazy = opened(path, tmp_path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    assert len(lazy[:10]) == 10
    with pytest.raises(DataError, check=has_subject("data file")):
        lazy[40:]


def test_parquet_row_of_another_length_or_without_an_image_is_named(tmp_path: Path) -> None:
    spec = DataSpec(shape=(1, 1, 2), range=(0.0, 1.0))
    kind = pa.list_(pa.float32())
    for rows, said in (
        ([[0.0, 1.0]] * 7 + [[0.0]], "list of 1 in row 7"),
        ([[0.0, 1.0]] * 7 + [None], "none in row 7"),
        ([[0.0, 1.0]] * 7 + [[0.0, None]], "missing value in row 7"),
    ):
        with case(said=said):
            pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "a.parquet")
            with pytest.raises(DataError, match=said):
                open_images(open_arrays(tmp_path / "a.parquet"), spec, tmp_path / "kept")


def test_columns_lie_beside_the_images_in_every_source(tmp_path: Path) -> None:
    patients = [f"p{k // 3}".ljust(200, "x") for k in range(50)]
    labels = np.arange(50) % 4
    np.savez(tmp_path / "a.npz", images=BYTES, patients=patients, labels=labels)
    beside = folder(tmp_path, BYTES)
    np.save(beside / "patients.npy", np.array(patients))
    np.save(beside / "labels.npy", labels)
    image = pa.FixedShapeTensorArray.from_numpy_ndarray(BYTES)
    pq.write_table(
        pa.table({"image": image, "patient": patients, "label": labels}), tmp_path / "a.parquet"
    )
    for path in (tmp_path / "a.npz", beside, tmp_path / "a.parquet"):
        with case(path=path.name):
            source = open_arrays(path)
            assert source.column("patients", 900).tolist() == patients
            assert source.column("labels", 100).tolist() == labels.tolist()
            with pytest.raises(DataError, match="caption"):
                source.column("captions", 100)
            with pytest.raises(DataError, match="at most"):
                source.column("patients", 1)


def test_latents_are_opened_where_there_are_no_images_and_never_as_images(tmp_path: Path) -> None:
    latents = np.random.default_rng(2).normal(0, 9, (50, 2, 3, 4)).astype(np.float16)
    np.savez(tmp_path / "a.npz", latents=latents)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "latents.npy", latents)
    pq.write_table(
        pa.table({"latent": pa.FixedShapeTensorArray.from_numpy_ndarray(latents)}),
        tmp_path / "a.parquet",
    )
    for path in (tmp_path / "a.npz", tmp_path / "folder", tmp_path / "a.parquet"):
        with case(path=path.name):
            source = open_arrays(path)
            assert source.name == "latents"
            assert torch.equal(
                open_latents(source, (2, 3, 4), tmp_path / "kept")[:],
                torch.from_numpy(latents).float(),
            )
            with pytest.raises(DataError, check=has_subject("latents")):
                open_latents(source, (4, 3, 2), tmp_path / "kept")
            with pytest.raises(DataError, check=has_subject("data")):
                read_images(path, SPEC)


def test_rows_outside_and_indices_of_another_kind_are_refused(tmp_path: Path) -> None:
    lazy = opened(npy(tmp_path, BYTES), tmp_path)
    for rows in (torch.tensor([50]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            lazy[rows]
    for wrong in (torch.ones(50, dtype=torch.bool), slice(0, 9, 2), torch.tensor([[1]])):
        with pytest.raises(TypeError):
            lazy[wrong]
    assert select(lazy, torch.arange(50)) is lazy
