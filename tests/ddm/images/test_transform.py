"""A picture through a plan's transform: closed forms, and the same by PIL, MONAI and dense matrices."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ddm.errors import DataError
from ddm.images.fit import fit
from ddm.images.geometry import antialiased, covering_size, fitting_size, slice_numbers
from ddm.images.picture import Picture
from ddm.images.transform import Transform, to_stored
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import (
    CentreFit,
    Content,
    CropFit,
    FullRange,
    PadFit,
    PercentilesRange,
    Slices,
    SpacingFit,
    StretchFit,
    TransformSpec,
    ValuesRange,
    WindowRange,
)
from tests.support.case import case
from tests.support.errors import has_subject

AS_IT_IS = ValuesRange(low=0.0, high=1.0)  # with the range 0 to 1, values stay


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def through(
    spec: TransformSpec, values: np.ndarray, shape: tuple[int, ...], **known: object
) -> np.ndarray:
    (picture,) = Transform(spec, DataSpec(shape=shape, range=(0.0, 1.0))).apply(
        Picture(values, **known)
    )
    return picture


def triangle(old: int, new: int) -> np.ndarray:
    """The dense matrix (new, old) of linear resampling by half-pixel centres, as wide as a step where it shrinks."""
    step = old / new
    width = max(1.0, step)
    centres = (np.arange(new)[:, None] + 0.5) * step - 0.5
    weights = np.maximum(0.0, 1 - np.abs(np.arange(old)[None] - centres) / width)
    return weights / weights.sum(1, keepdims=True)


def test_resampling_is_that_of_pil_on_images_and_of_dense_matrices_on_volumes() -> None:
    for sides, size in (
        ((40, 31), (16, 16)),
        ((9, 50), (18, 7)),
        ((5, 5), (64, 64)),
        ((64, 48), (64, 48)),
    ):
        with case(sides=sides, size=size):
            values = floats(1, *sides)
            wanted = np.asarray(
                Image.fromarray(values[0]).resize(size[::-1], Image.Resampling.BILINEAR)
            )
            assert np.allclose(antialiased(values, size)[0], wanted, atol=1e-5)
    for solid, new_size in (((12, 9, 20), (5, 9, 8)), ((4, 7, 6), (9, 3, 6))):
        with case(solid=solid, new_size=new_size):
            values = floats(2, *solid)
            matrices = [triangle(old, new) for old, new in zip(solid, new_size, strict=True)]
            wanted = np.einsum("cdhw,xd,yh,zw->cxyz", values.astype(np.float64), *matrices)
            assert np.allclose(antialiased(values, new_size), wanted, atol=1e-5)
            nearest = values[
                (
                    slice(None),
                    *np.ix_(*(np.arange(n) * o // n for o, n in zip(solid, new_size, strict=True))),
                )
            ]
            assert not np.allclose(nearest, wanted, atol=1e-2)  # the control


def test_a_constant_stays_and_a_ramp_stays_a_ramp_wherever_the_edge_does_not_reach() -> None:
    for sides, shape in (
        ((50, 40), (16, 16)),
        ((7, 9), (16, 16)),
        ((20, 30, 24), (8, 8, 8)),
        ((5, 6, 7), (8, 8, 8)),
    ):
        for chosen in (CropFit(), StretchFit(), PadFit(), CentreFit(), SpacingFit(mm=2.0)):
            with case(sides=sides, kind=chosen.kind):
                spec = TransformSpec(range=AS_IT_IS, fit=chosen, padding=0.25)
                same = np.full((1, *sides), 0.25, np.float32)
                actual = through(spec, same, (1, *shape), spacing=(1.0,) * len(sides))
                assert actual.shape == (1, *shape) and np.allclose(actual, 0.25, atol=1e-6)
    for old, new in ((60, 20), (20, 60), (33, 10)):
        ramp = np.broadcast_to(np.arange(old, dtype=np.float32)[None, None] / old, (1, 4, old))
        actual = antialiased(np.ascontiguousarray(ramp), (4, new))[0, 0]
        wanted = ((np.arange(new) + 0.5) * old / new - 0.5) / old
        inside = slice(2, -2) if old > new else slice(new // old + 1, -(new // old) - 1)
        exact = max(old, new) % min(old, new) == 0  # else within a twentieth of a pixel, as PIL
        assert np.abs(actual[inside] - wanted[inside]).max() <= (1e-6 if exact else 0.05 / old)


def test_sizes_keep_proportions_by_spacing_and_reach_the_plans_shape_on_one_side() -> None:
    for extent in product((3.0, 40.0, 90.0), (50.0, 7.5), (60.0, 61.0)):
        for shape in ((4, 6, 8), (16, 16, 16)):
            for size, inside in (
                (covering_size(extent, shape), 1),
                (fitting_size(extent, shape), -1),
            ):
                with case(extent=extent, shape=shape, size=size):
                    assert all(
                        inside * (side - wanted) >= 0
                        for side, wanted in zip(size, shape, strict=True)
                    )
                    tight = [i for i in range(3) if size[i] == shape[i]]
                    assert tight
                    off = [
                        max(
                            abs(e / (extent[i] / size[i]) - s)
                            for e, s in zip(extent, size, strict=True)
                        )
                        for i in tight
                    ]
                    # rounding alone, or a side that is thinner than a voxel
                    assert min(off) <= 0.5 + 1e-6 or 1 in size


def test_a_ball_is_round_after_thick_slices_and_as_large_as_its_millimetres_say() -> None:
    spacing = (3.0, 1.0, 1.5)
    sides = (20, 60, 40)  # 60 mm each
    grid = np.meshgrid(
        *[(np.arange(n) + 0.5) * mm - 30 for n, mm in zip(sides, spacing, strict=True)],
        indexing="ij",
    )
    ball = (sum(axis**2 for axis in grid) <= 20.0**2).astype(np.float32)[None]
    for chosen, radius in ((CropFit(), 10.0), (PadFit(), 10.0), (SpacingFit(mm=2.5), 8.0)):
        with case(kind=chosen.kind):
            actual = through(
                TransformSpec(range=AS_IT_IS, fit=chosen), ball, (1, 30, 30, 30), spacing=spacing
            )[0]
            across = [
                float(
                    np.sqrt(
                        (actual.sum((1, 2)), actual.sum((0, 2)), actual.sum((0, 1)))[axis].max()
                        / np.pi
                    )
                )
                for axis in range(3)
            ]
            assert np.allclose(across, radius, rtol=0.04)
    # the control: no spacing
    stretched = through(TransformSpec(range=AS_IT_IS, fit=CropFit()), ball, (1, 30, 30, 30))
    assert (
        np.ptp(
            [float((stretched[0] > 0.5).any(others).sum()) for others in ((1, 2), (0, 2), (0, 1))]
        )
        > 5
    )


def test_the_middle_stays_and_what_is_odd_is_lost_or_added_at_the_end() -> None:
    values = np.arange(35, dtype=np.float32).reshape(1, 7, 5)
    spec = TransformSpec(range=ValuesRange(low=0.0, high=1e3), fit=CentreFit(), padding=0.5)
    actual = through(spec, values, (1, 4, 8))[0]
    assert np.allclose(actual[:, 1:6] * 1e3, values[0, 1:5]) and np.all(actual[:, [0, 6, 7]] == 0.5)


@pytest.mark.slow  # seconds to import MONAI
def test_cutting_padding_and_content_are_those_of_monai() -> None:
    from monai.transforms import CropForeground, ResizeWithPadOrCrop

    spec = TransformSpec(range=AS_IT_IS, fit=CentreFit(), padding=0.5)
    for sides, shape in (((9, 20), (16, 10)), ((10, 10), (16, 6)), ((12, 7, 8), (6, 8, 8))):
        with case(sides=sides):
            values = floats(1, *sides)
            wanted = ResizeWithPadOrCrop(shape, value=0.5)(values).numpy()
            assert np.array_equal(through(spec, values, (1, *shape)), wanted)
    values = np.zeros((2, 30, 40), np.float32)
    values[0, 7:20, 11:33] = 0.9
    values[1, 9, 5] = 0.06
    values[0, 2, 2] = 0.04  # below the threshold
    box = CropForeground(select_fn=lambda x: x > 0.05, allow_smaller=True)(values)
    actual = through(
        TransformSpec(range=AS_IT_IS, fit=CentreFit(), content=Content(threshold=0.05)),
        values,
        tuple(box.shape),
    )
    assert np.array_equal(actual, box.numpy()) and box.shape == (2, 13, 28)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.float32])
def test_each_range_maps_its_two_values_to_the_ends_and_clips_beyond(dtype: type) -> None:
    values = np.linspace(0, 200, 201).astype(dtype).reshape(1, 1, 201).repeat(2, 1)
    known = {"window": (50.0, 150.0), "full": (0.0, 250.0)}
    for chosen, low, high in (
        (ValuesRange(low=20.0, high=120.0), 20.0, 120.0),
        (WindowRange(), 50.0, 150.0),
        (FullRange(), 0.0, 250.0),
        (PercentilesRange(), *np.percentile(values, (0.5, 99.5))),
        (PercentilesRange(low=10.0, high=50.0), *np.percentile(values, (10.0, 50.0))),
    ):
        with case(kind=chosen.kind):
            spec = TransformSpec(range=chosen, fit=CentreFit())
            (picture,) = Transform(spec, DataSpec(shape=(1, 2, 201), range=(-3.0, 5.0))).apply(
                Picture(values, **known)
            )
            wanted = -3 + 8 * ((np.arange(201) - low) / (high - low)).clip(0, 1)
            assert np.allclose(picture[0, 0], wanted, atol=1e-5)
    plain = TransformSpec(range=WindowRange(fallback="full"), fit=CentreFit())
    assert np.allclose(
        through(plain, values, (1, 2, 201), full=(0.0, 250.0))[0, 0],
        np.arange(201) / 250,
        atol=1e-6,
    )


def test_what_has_no_window_no_bounds_or_no_contrast_is_refused_with_the_reason() -> None:
    values = floats(1, 8, 8)
    nan = values.copy()
    nan[0, 3, 3] = np.nan
    for chosen, pixels, words in (
        (WindowRange(), values, "window"),
        (FullRange(), values, "full range"),
        (WindowRange(fallback="full"), values, "full range"),
        (PercentilesRange(), np.full((1, 8, 8), 3, np.uint8), "differ"),
        (PercentilesRange(), nan, "finite"),
        (AS_IT_IS, nan, "finite"),
    ):
        with case(kind=chosen.kind, words=words), pytest.raises(DataError, match=words):
            through(TransformSpec(range=chosen), pixels, (1, 8, 8))
    with pytest.raises(DataError, match="threshold"):
        dark = TransformSpec(range=AS_IT_IS, content=Content(threshold=0.5))
        through(dark, values / 4, (1, 8, 8))
    with pytest.raises(DataError, check=has_subject("spacing")):
        through(TransformSpec(range=AS_IT_IS, fit=SpacingFit(mm=1.0)), values, (1, 8, 8))


def test_grey_is_pils_luminance_and_channels_are_repeated_or_picked_in_order() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16), np.uint8)
    picture = {"full": (0.0, 255.0)}
    grey = TransformSpec(channels="grey", range=FullRange(), fit=CentreFit())
    wanted = np.asarray(Image.fromarray(np.moveaxis(pixels, 0, -1)).convert("L"))
    actual = through(grey, pixels, (1, 16, 16), **picture)
    assert np.abs(actual[0] * 255 - wanted).max() <= 1.0  # PIL cuts to whole numbers
    assert np.abs(actual[0] * 255 - pixels.mean(0)).max() > 10  # the control: luminance is no mean
    one = through(
        TransformSpec(channels="rgb", range=FullRange(), fit=CentreFit()),
        pixels[:1],
        (3, 16, 16),
        **picture,
    )
    assert np.allclose(one, pixels[:1] / 255, atol=1e-6) and np.array_equal(one[0], one[2])
    picked = TransformSpec(channels="pick", pick=(2, 0), range=FullRange(), fit=CentreFit())
    assert np.allclose(
        through(picked, pixels, (2, 16, 16), **picture), pixels[[2, 0]] / 255, atol=1e-6
    )
    for spec, num, shape in (
        (TransformSpec(), 3, 1),
        (grey, 2, 1),
        (picked, 2, 2),
        (TransformSpec(), 1, 3),
    ):
        with (
            case(channels=spec.channels, num=num),
            pytest.raises(DataError, check=has_subject("channels")),
        ):
            through(spec, pixels[:num], (shape, 16, 16), **picture)


def test_slices_are_upright_and_lie_where_the_share_says() -> None:
    depth = 10
    height = 6
    width = 8
    numbers = np.arange(depth * height * width, dtype=np.float32).reshape(1, depth, height, width)
    data = DataSpec(shape=(1, 10, 10), range=(0.0, float(numbers.size)))
    for axis, wanted in (
        ("axial", [numbers[:, d] for d in (3, 6)]),
        ("coronal", [numbers[:, ::-1, h] for h in (2, 3)]),
        ("sagittal", [numbers[:, ::-1, :, w] for w in (2, 5)]),
    ):
        with case(axis=axis):
            spec = TransformSpec(
                range=ValuesRange(low=0.0, high=float(numbers.size)),
                slices=Slices(axis=axis, count=2, share=(0.2, 0.8)),
                fit=CentreFit(),
            )
            actual = Transform(spec, data).apply(Picture(numbers, spacing=(1.0, 1.0, 1.0)))
            for image, slice_ in zip(actual, wanted, strict=True):
                top = (10 - slice_.shape[1]) // 2
                left = (10 - slice_.shape[2]) // 2
                inside = image[:, top : top + slice_.shape[1], left : left + slice_.shape[2]]
                assert np.allclose(inside, slice_, rtol=1e-5)
    # an image among volumes counts as one of them
    flat = Transform(spec, data).apply(Picture(numbers[:, 0]))
    assert len(flat) == 2 and np.array_equal(*flat)
    with pytest.raises(DataError, check=has_subject("picture")) as caught:
        Transform(TransformSpec(), data).apply(Picture(numbers))
    assert "[transform.slices]" in caught.value.remedy


def test_slices_of_a_volume_share_its_range_and_its_content() -> None:
    volume = np.zeros((1, 8, 8, 8), np.float32)
    volume[0, 1:7, 2:6, 2:6] = np.linspace(0.2, 1.0, 6)[:, None, None]
    spec = TransformSpec(
        range=AS_IT_IS, content=Content(threshold=0.1), slices=Slices(count=6), fit=CentreFit()
    )
    actual = Transform(spec, DataSpec(shape=(1, 4, 4), range=(0.0, 1.0))).apply(Picture(volume))
    assert np.allclose([image.mean() for image in actual], np.linspace(0.2, 1.0, 6), atol=1e-6)


@settings(max_examples=50)
@given(st.integers(1, 400), st.integers(1, 64), st.floats(0, 0.9), st.floats(0.01, 1.0))
def test_slices_are_as_many_as_asked_ascending_and_within_their_share(
    length: int, count: int, low: float, part: float
) -> None:
    share = (low, min(1.0, low + part))
    actual = slice_numbers(length, Slices(count=count, share=share))
    assert actual == sorted(actual) and len(actual) == count  # whatever the length
    assert all(
        share[0] * length - 1 <= number < share[1] * length + 1 and 0 <= number < length
        for number in actual
    )
    assert max(actual.count(number) for number in actual) <= max(
        1, np.ceil(count / ((share[1] - share[0]) * length)) + 1
    )
    if count <= (share[1] - share[0]) * length:
        assert len(set(actual)) == count


def test_sizes_are_refused_by_arithmetic_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = DataSpec(shape=(1, 64, 64), range=(0.0, 1.0))
    never: list[tuple[int, ...]] = []

    def resample(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
        never.append(size)
        return values

    monkeypatch.setattr("ddm.images.transform.antialiased", resample)

    def refused(spec: TransformSpec, picture: Picture, most: int) -> None:
        with pytest.raises(DataError, check=has_subject("picture")):
            Transform(spec, data, max_bytes=most).apply(picture)

    thin = Picture(floats(1, 2, 30_000))  # 64 x 960,000 before its middle is kept
    refused(TransformSpec(range=AS_IT_IS), thin, 1 << 26)
    fine = Picture(floats(1, 64, 64), spacing=(500.0, 500.0))
    refused(TransformSpec(range=AS_IT_IS, fit=SpacingFit(mm=0.001)), fine, 1 << 40)
    refused(
        TransformSpec(range=AS_IT_IS, fit=SpacingFit(mm=0.1)),
        Picture(floats(1, 64, 64), spacing=(5, 5)),
        1 << 40,
    )
    for spacing in ((1e-300, 1e300), (5e-324, 1.0)):
        with pytest.raises(DataError, check=has_subject("axes")):
            Transform(TransformSpec(range=AS_IT_IS), data).apply(
                Picture(floats(1, 9, 9), spacing=spacing)
            )
    whole = Picture(np.broadcast_to(np.uint8(1), (1, 1 << 16, 1 << 16)))  # 4 GiB that nobody holds
    refused(TransformSpec(range=AS_IT_IS), whole, 1 << 30)
    assert not never


def test_pictures_that_no_decoder_gives_are_refused() -> None:
    data = DataSpec(shape=(1, 8, 8), range=(0.0, 1.0))
    for picture in (
        Picture(np.zeros((8, 8), np.float32)),
        Picture(np.zeros((1, 0, 8), np.float32)),
        Picture(np.zeros((1, 8, 8), np.float64)),
        Picture(np.zeros((1, 8, 8), np.complex64)),
        Picture(floats(1, 8, 8), spacing=(1.0,)),
        Picture(floats(1, 8, 8), spacing=(1.0, 0.0)),
        Picture(floats(1, 8, 8), spacing=(1.0, float("nan"))),
        Picture(floats(1, 8, 8), spacing=(1.0, float("inf"))),
    ):
        with case(picture=picture), pytest.raises(DataError):
            Transform(TransformSpec(range=AS_IT_IS), data).apply(picture)


def test_whatever_a_plan_does_not_take_becomes_as_many_blank_samples_and_says_why_here_alone() -> (
    None
):
    data = DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0))
    image = floats(1, 8, 8)
    volume = floats(1, 5, 8, 8)
    huge = image.copy()
    huge[0, 0] = 3e38, -3e38, *huge[0, 0, 2:]
    for words, spec, picture in (
        ("threshold", {"range": AS_IT_IS, "content": Content(threshold=0.9)}, Picture(image / 2)),
        ("differ", {"range": PercentilesRange()}, Picture(np.full((1, 8, 8), 7, np.uint8))),
        ("finite", {"range": AS_IT_IS}, Picture(np.full((1, 8, 8), np.nan, np.float32))),
        ("window", {"range": WindowRange()}, Picture(image)),
        ("full range", {"range": FullRange()}, Picture(image)),
        ("spacing", {"fit": SpacingFit(mm=1.0)}, Picture(image)),
        ("channels", {}, Picture(floats(2, 8, 8))),
        ("picture", {}, Picture(volume)),
        ("bytes of memory", {"fit": SpacingFit(mm=0.001)}, Picture(image, spacing=(9.0, 9.0))),
        ("axes", {}, Picture(image, spacing=(1e-300, 1e300))),
        ("ndim", {}, object()),  # no error of ours
        (
            "threshold",
            {"range": AS_IT_IS, "content": Content(threshold=0.9), "slices": 3},
            Picture(volume / 2),
        ),
        ("channels", {"slices": 3}, Picture(floats(2, 5, 8, 8))),
    ):
        with case(words=words, spec=spec):
            slices = Slices(count=spec["slices"]) if "slices" in spec else None
            transform = Transform(TransformSpec(**(spec | {"slices": slices})), data)
            samples, problem = transform.apply_to_any(picture)
            assert len(samples) == (3 if slices else 1) and problem
            assert words in problem or words == "ndim"
            assert all(sample.shape == data.shape and np.all(sample == -1.0) for sample in samples)
            with pytest.raises((DataError, AttributeError)):
                transform.apply(picture)
    for wide in (
        TransformSpec(storage="float16"),
        TransformSpec(range=ValuesRange(low=-1e9, high=1e9)),
    ):
        samples, problem = Transform(wide, data).apply_to_any(Picture(huge))
        assert problem is None and np.isfinite(samples[0]).all()
    samples, problem = Transform(TransformSpec(), data).apply_to_any(Picture(image))
    assert problem is None and np.array_equal(
        samples, Transform(TransformSpec(), data).apply(Picture(image))
    )


def test_a_picture_is_not_changed_and_gives_the_same_again() -> None:
    values = floats(1, 33, 47)
    before = values.copy()
    transform = Transform(TransformSpec(), DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0)))
    first = transform.apply(Picture(values))
    again = transform.apply(Picture(values))
    assert np.array_equal(first[0], again[0]) and np.array_equal(values, before)
    assert first[0].dtype == np.float32 and first[0].flags.c_contiguous
    assert first[0].min() >= -1.0 and first[0].max() <= 1.0


def test_compact_types_are_read_back_within_half_a_step() -> None:
    for low, high in ((-1.0, 1.0), (0.0, 0.3), (-1000.0, 3000.0)):
        values = (low + (high - low) * floats(4, 1, 8, 8)).clip(low, high)
        values[0, 0, 0, :2] = low, high
        for storage, step in (("uint8", (high - low) / 255), ("uint16", (high - low) / 65535)):
            with case(low=low, storage=storage):
                kept = to_stored(values, storage, (low, high))
                assert kept.dtype == storage and {int(kept.min()), int(kept.max())} == {
                    0,
                    np.iinfo(storage).max,
                }
                back = fit(
                    kept, range(4), spec=DataSpec(shape=(1, 8, 8), range=(low, high))
                ).numpy()
                assert np.abs(back - values).max() <= step / 2 + 1e-6 * (high - low)
                assert np.array_equal(to_stored(back, storage, (low, high)), kept)
        half = to_stored(values, "float16", (low, high))
        back = fit(half, range(4), spec=DataSpec(shape=(1, 8, 8), range=(low, high))).numpy()
        assert (
            np.abs(back - values).max() <= 2**-10 * max(-low, high)
            and back.min() >= low
            and back.max() <= high
        )


def test_a_ratio_of_sides_is_no_length() -> None:
    values = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    spec = TransformSpec(range={"kind": "full"}, fit={"kind": "spacing", "mm": 1.0})
    transform = Transform(spec, DataSpec(shape=(1, 8, 8), range=(0.0, 1.0)))
    stated = Picture(values, (1.0, 1.0), full=(0, 255))
    assert len(transform.apply(stated)) == 1
    with pytest.raises(DataError, check=has_subject("spacing")):
        transform.apply(replace(stated, spacing_in_mm=False))
