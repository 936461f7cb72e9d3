"""Shapes and types of arrays: what they mean as pictures, and which have no certain meaning."""

import io
from pathlib import Path

import numpy as np
import pytest

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.layout import channels_first
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason
from tests.support.case import case


def counted(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def reason_of(path: Path) -> Reason:
    with pytest.raises(ImageError) as caught:
        for picture in decode(FileContent.of(path)):
            if isinstance(picture, ImageError):
                raise picture
    return caught.value.reason


def test_channels_are_first_or_last_where_only_one_of_them_can_be() -> None:
    for shape, is_last in (
        *(
            ((1, 6, 5), False),
            ((3, 6, 5), False),
            ((6, 5, 3), True),
            ((6, 5, 1), True),
            ((3, 6, 4), False),
        ),
        *(((2, 8, 6, 5), False), ((4, 8, 6, 5), False), ((8, 6, 5, 1), True), ((8, 6, 5, 4), True)),
    ):
        with case(shape):
            values = counted(*shape)
            expected = np.moveaxis(values, -1, 0) if is_last else values
            assert np.array_equal(channels_first(values, DecodeLimits()), expected)
    assert np.array_equal(channels_first(counted(6, 5), DecodeLimits()), counted(1, 6, 5))


def test_shapes_without_a_certain_meaning_are_refused() -> None:
    for shape in (
        *(
            (3, 6, 3),
            (1, 6, 3),
            (3, 6, 1),
            (1, 6, 1),
            (6, 5, 4),
            (4, 6, 5),
            (6, 5, 2),
            (28, 28, 28),
        ),
        *((1, 8, 6, 3), (3, 8, 6, 4), (8, 8, 8, 8), (5,), (2, 3, 4, 5, 6), ()),
    ):
        with case(shape), pytest.raises(ImageError) as caught:
            channels_first(counted(*shape), DecodeLimits())
        assert caught.value.reason in (Reason.SHAPE, Reason.DAMAGED)


def test_a_single_image_is_not_read_as_many_rows(tmp_path: Path) -> None:
    shapes = ((40, 30), (40, 30, 3), (40, 30, 1), (40, 30, 4), (3, 40, 30), (40, 3, 30), (40,), ())
    for number, shape in enumerate(shapes):
        for kind in ("npy", "npz"):
            if kind == "npz" and shape == (3, 40, 30):
                continue  # an array called images holds several
            with case(shape=shape, kind=kind):
                path = tmp_path / f"{number}.{kind}"
                if kind == "npy":
                    np.save(path, counted(*shape))
                else:
                    np.savez(path, images=counted(*shape))
                assert reason_of(path) in (Reason.AMBIGUOUS, Reason.SHAPE, Reason.DAMAGED)
    np.save(tmp_path / "one.npy", counted(1, 40, 30))
    (picture,) = decode(FileContent.of(tmp_path / "one.npy"))
    assert np.array_equal(picture.values, counted(1, 40, 30))


def test_every_type_and_order_of_numbers_gives_the_same_values(tmp_path: Path) -> None:
    values = (np.arange(2 * 3 * 20 * 15) % 120).reshape(2, 3, 20, 15)
    names = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
    full = {"u1": (0, 255), "i1": (-128, 127), "u2": (0, 65535), "i2": (-32768, 32767)}
    for name in names:
        for order in "<>":
            for layout in "CF":
                for save in (np.save, lambda path, array: np.savez_compressed(path, images=array)):
                    array = np.array(values, dtype=order + name, order=layout)
                    path = tmp_path / ("a.npy" if save is np.save else "a.npz")
                    with case(name, order, layout, path.suffix):
                        save(path, array)
                        pictures = list(decode(FileContent.of(path)))
                        assert [
                            np.array_equal(picture.values, values[k])
                            for k, picture in enumerate(pictures)
                        ] == [
                            True,
                            True,
                        ]
                        assert all(picture.full == full.get(name) for picture in pictures)
                        assert all(picture.values.dtype.isnative for picture in pictures)
    np.save(tmp_path / "b.npy", values % 2 == 0)
    first = next(iter(decode(FileContent.of(tmp_path / "b.npy"))))
    assert np.array_equal(first.values, values[0] % 2 == 0) and first.full == (0, 1)


def test_values_that_are_no_real_numbers_are_refused_with_their_reason(tmp_path: Path) -> None:
    records = np.zeros((4, 20, 15), [("red", "u1"), ("green", "u1")])
    for name, array in {
        "complex": np.zeros((4, 20, 15), np.complex64),
        "records": records,
        "text": np.full((4, 20, 15), "a"),
        "dates": np.zeros((4, 20, 15), "M8[s]"),
        "objects": np.full((4, 20, 15), None, dtype=object),
    }.items():
        with case(name):
            np.save(tmp_path / "a.npy", array)
            assert reason_of(tmp_path / "a.npy") is Reason.UNSUPPORTED
            np.savez(tmp_path / "a.npz", images=array)
            assert reason_of(tmp_path / "a.npz") is Reason.UNSUPPORTED
    np.save(tmp_path / "a.npy", np.full((2, 20, 15), 1e300))
    assert reason_of(tmp_path / "a.npy") is Reason.NOT_FINITE


def test_bytes_after_an_array_or_too_few_are_refused(tmp_path: Path) -> None:
    whole = io.BytesIO()
    np.save(whole, counted(4, 20, 15))
    path = tmp_path / "a.npy"
    path.write_bytes(whole.getvalue() * 2)  # np.save twice into one file
    assert reason_of(path) is Reason.DAMAGED
    path.write_bytes(whole.getvalue()[:-1])
    assert reason_of(path) is Reason.TRUNCATED


def test_an_npy_inside_another_file_is_one_image(tmp_path: Path) -> None:
    for shape in ((6, 5), (3, 6, 5), (6, 5, 3), (1, 4, 6, 5)):
        for order in "CF":
            with case(shape, order):
                data = io.BytesIO()
                np.save(data, np.array(counted(*shape), order=order))
                (picture,) = decode(FileContent(data=data.getvalue(), name="a.npy"))
                assert isinstance(picture, DecodedPicture)
                assert np.array_equal(
                    picture.values, channels_first(counted(*shape), DecodeLimits())
                )
    data = io.BytesIO()
    np.savez(data, images=counted(2, 6, 5))
    with pytest.raises(ImageError, match="inside another file"):
        list(decode(FileContent(data=data.getvalue(), name="a.npz")))
