"""What a data set uses of its range, against shares that were chosen; and what is said about it."""

import numpy as np
import pytest

from ddm.images.ranges import (
    EnlargementCounter,
    RangeCounter,
    RangeUse,
    ValueKind,
    range_of_type,
    range_remarks,
)
from tests.support.case import case

RNG = np.random.default_rng(0)


def images(low: float, high: float, num: int = 200) -> np.ndarray:
    """Images that each reach from `low` to `high`."""
    made = RNG.uniform(low, high, (num, 1, 4, 4))
    made[:, 0, 0, 0] = low
    made[:, 0, 3, 3] = high
    return made


def use_of(array: np.ndarray) -> RangeUse | None:
    counter = RangeCounter()
    for block in np.array_split(array, 7):
        counter.add_images(block)
    return counter.use()


def remark(
    array: np.ndarray, value_range: tuple[float, float], kind: ValueKind = ValueKind.FLOATS
) -> str:
    return " ".join(range_remarks(use_of(array), value_range, kind))


def test_zero_to_one_under_minus_one_to_one_fills_half_of_the_declared_range() -> None:
    remark_text = remark(images(0, 1), (-1.0, 1.0))
    assert "fill 50% of the declared range -1 to 1: 0 to 1." in remark_text
    assert "Scale the arrays" in remark_text
    assert "data.range" in remark_text


def test_twelve_bits_in_sixteen_fill_six_percent_of_the_range_of_their_type() -> None:
    value_range = range_of_type("uint16")
    assert value_range == (0.0, 65535.0)
    remark_text = remark(images(0, 4095).astype(np.uint16), value_range, ValueKind.WHOLE)
    assert "fill 6% of the range of their type, 0 to 65535: 0 to 4095." in remark_text
    assert "12 bits" in remark_text


def test_share_that_is_used_decides_about_the_remark() -> None:
    for low, high, expected in [
        (-1, 1, ""),
        (-1, 0.3, ""),
        (-1, 0.1, "55%"),
        (0.5, 1, "25%"),
        (0, 0.001, "less than"),
    ]:
        with case((low, high)):
            remark_text = remark(images(low, high), (-1.0, 1.0))
            assert bool(remark_text) == bool(expected)
            assert expected in remark_text


def test_one_image_with_an_outlier_does_not_hide_what_all_others_use() -> None:
    array = images(0, 4095)
    array[17, 0, 1, 1] = 65535
    remark_text = remark(array, (0.0, 65535.0), ValueKind.WHOLE)
    assert "6%" in remark_text
    assert "0 to 4095 in 99% of 200 images" in remark_text


def test_values_beyond_the_range_are_said_to_be_refused() -> None:
    remark_text = remark(images(0, 255), (-1.0, 1.0))
    assert "reach from 0 to 255, beyond the declared range -1 to 1" in remark_text
    assert remark(images(-1.0005, 1.0005), (-1.0, 1.0)) == "", "rounding is no remark"


def test_images_of_one_value_each_and_no_images_give_no_remark() -> None:
    assert remark(np.full((5, 1, 2, 2), 0.25), (-1.0, 1.0)) == ""
    assert range_remarks(None, (-1.0, 1.0), ValueKind.FLOATS) == []
    assert use_of(np.zeros((0, 1, 2, 2))) is None


def test_counting_image_by_image_and_in_blocks_is_the_same() -> None:
    array = RNG.normal(size=(50, 1, 3, 3))
    counter = RangeCounter()
    for image in array:
        counter.add(float(image.min()), float(image.max()))
    assert counter.use() == use_of(array)


def test_images_enlarged_more_than_twice_are_counted_with_the_largest_as_example() -> None:
    counter = EnlargementCounter()
    for sides, resampled in [
        ((32, 32), (64, 64)),
        ((28, 28), (98, 98)),
        ((10, 40), (24, 96)),
        ((256, 256), (64, 64)),
    ]:
        counter.add(sides, resampled)
    [remark_text] = counter.remarks("public images")
    assert remark_text.startswith(
        "2 of 4 public images are enlarged more than 2 times, up to 3.5 times (28 x 28 to 98 x 98)"
    )
    few = EnlargementCounter()
    few.add((32, 32), (64, 64))
    assert few.remarks() == []


@pytest.mark.parametrize("kind", list(ValueKind))
def test_every_kind_of_values_says_what_to_do(kind: ValueKind) -> None:
    remark_text = remark(images(0, 1), (-1.0, 1.0), kind)
    assert remark_text.endswith(".")
    assert len(remark_text.split(". ")) >= 2
