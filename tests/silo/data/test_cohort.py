"""Private images from disk: what is taken, what is refused, and that the digest is the site's own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.errors import DataError, MissingFileError
from ddm.protocol.base import Unit
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from silo.data.cohort import Cohort, dataset_digest
from tests.support.case import case
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject

SPEC = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
SALT = b"s" * 32
IMAGES = np.linspace(-1, 1, 6 * 16, dtype=np.float32).reshape(6, 1, 4, 4)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def load(
    path: Path, min_images: int = 1, unit: Unit = "image", num_classes: int | None = None
) -> Cohort:
    return cohort_at(
        path, SPEC, min_images=min_images, salt=SALT, unit=unit, num_classes=num_classes
    )


def by_patient(path: Path, patients: object, **kwargs) -> Cohort:
    """A cohort of six images by patient."""
    return load(save(path / "p.npz", images=IMAGES, patients=patients), unit="patient", **kwargs)


def test_cohort_takes_floats_with_and_without_a_channel(tmp_path: Path) -> None:
    array = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 1, 4, 4)
    with_channel = load(save(tmp_path / "a.npz", images=array))
    without = load(save(tmp_path / "b.npz", images=array[:, 0]))
    assert torch.equal(with_channel.images, torch.from_numpy(array))
    assert torch.equal(with_channel.images, without.images)
    assert with_channel.num_units == 3


def test_cohort_scales_bytes_to_the_plans_range(tmp_path: Path) -> None:
    array = np.zeros((2, 4, 4), dtype=np.uint8)
    array[1] = 255
    images = load(save(tmp_path / "a.npz", images=array)).images
    assert float(images[0].min()) == -1.0
    assert float(images[1].max()) == 1.0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 1, 5, 5), dtype=np.float32),
        np.zeros((3, 4, 4, 4), dtype=np.float32),
        np.zeros(16, dtype=np.float32),
        np.full((3, 1, 4, 4), 2.0, dtype=np.float32),
        np.full((3, 1, 4, 4), np.nan, dtype=np.float32),
        np.zeros((3, 1, 4, 4), dtype=np.int64),
        np.array([{"a": 1}], dtype=object),
    ],
    ids=["size", "channels", "flat", "range", "nan", "integers", "pickled objects"],
)
def test_cohort_refuses_images_that_the_plan_did_not_ask_for(
    tmp_path: Path, array: np.ndarray
) -> None:
    with pytest.raises(DataError):
        load(save(tmp_path / "a.npz", images=array))


def test_cohort_refuses_too_few_images_another_array_and_other_files(tmp_path: Path) -> None:
    array = np.zeros((3, 1, 4, 4), dtype=np.float32)
    with pytest.raises(DataError, check=has_subject("images")):
        load(save(tmp_path / "a.npz", images=array), min_images=4)
    with pytest.raises(DataError):
        load(save(tmp_path / "b.npz", pictures=array))
    (tmp_path / "c.npz").write_bytes(b"not a zip")
    np.save(tmp_path / "d.npy", array)
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    whole = save(tmp_path / "e.npz", images=array).read_bytes()
    (tmp_path / "e.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("c.npz", "d.npz", "e.npz"):
        with pytest.raises(DataError):
            load(tmp_path / name)
    with pytest.raises(MissingFileError):
        load(tmp_path / "none.npz")


def test_dataset_digest_changes_with_one_value_and_with_the_sites_salt() -> None:
    images = torch.zeros(3, 1, 4, 4)
    changed = images.clone()
    changed[2, 0, 3, 3] = 1e-6
    digest = dataset_digest(images, SALT)
    assert digest == dataset_digest(images.clone(), SALT)
    assert digest != dataset_digest(changed, SALT)
    assert digest != dataset_digest(images, b"t" * 32)
    assert digest != dataset_digest(images.reshape(3, 1, 2, 8), SALT)


def test_every_image_is_its_own_unit_unless_the_plan_protects_patients(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", images=IMAGES, patients=["a"] * 5 + ["b"], labels=[9] * 6)
    cohort = load(path)
    assert (cohort.unit_N.tolist(), cohort.num_units, cohort.label_N) == (list(range(6)), 6, None)
    assert load(path, unit="patient").num_units == 2


@pytest.mark.parametrize(
    "patients",
    [
        ["zoe", "adam", "zoe", "mo", "adam", "zoe"],
        [b"zoe", b"adam", b"zoe", b"m\xf6", b"adam", b"zoe"],
        [" zoe", "adam", "zoe ", "mo", "adam", "zoe"],
        [70, 7, 70, 9, 7, 70],
        np.array([70, 7, 70, 9, 7, 70], dtype=np.uint64) + 2**63,
        [0.5, -1.0, 0.5, 3.0, -1.0, 0.5],
    ],
    ids=["text", "bytes", "blanks", "numbers", "large numbers", "floating point"],
)
def test_patients_become_numbers_in_order_of_first_appearance(
    tmp_path: Path, patients: object
) -> None:
    cohort = by_patient(tmp_path, patients)
    assert cohort.unit_N.tolist() == [0, 1, 0, 2, 1, 0]
    assert cohort.unit_N.dtype == torch.int64
    assert cohort.num_units == 3


@pytest.mark.parametrize(
    ("patients", "said"),
    [
        (["secret"] * 5, "shape"),
        ([["secret"] * 6], "shape"),
        ([1.0, 2.0, float("nan"), 2.0, 1.0, 1.0], "none for 1"),
        (["secret", "", "secret", " NaN ", "None", "secret"], "none for 3"),
        ([b"secret", b"", b"secret", b"x", b"y", b"z"], "none for 1"),
        (np.array(["secret", None, "b", "c", "d", "e"], dtype=object), "pickled"),
        (np.array(["2026-01-01"] * 6, dtype="datetime64[D]"), "text"),
        ([True] * 6, "text"),
        (["secret" * 1000] * 6, "at most"),
    ],
    ids=[
        "too few",
        "2-D",
        "nan",
        "missing text",
        "missing bytes",
        "objects",
        "dates",
        "booleans",
        "huge",
    ],
)
def test_patients_that_cannot_be_counted_are_refused_without_saying_who_they_are(
    tmp_path: Path, patients: object, said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        by_patient(tmp_path, patients)
    assert "secret" not in f"{caught.value} {caught.value.remedy}"


def test_plan_by_patient_refuses_a_file_without_patients(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=has_subject("data")):
        load(save(tmp_path / "a.npz", images=IMAGES), unit="patient")


def test_fewest_images_are_counted_in_images_and_not_in_patients(tmp_path: Path) -> None:
    assert by_patient(tmp_path, [1] * 5 + [2], min_images=6).num_units == 2
    with pytest.raises(DataError, check=has_subject("images")):
        by_patient(tmp_path, [1] * 5 + [2], min_images=7)


def test_one_patient_alone_is_refused_since_no_router_can_be_made_of_one_sketch(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, check=has_subject("patients")):
        by_patient(tmp_path, [1] * 6)


def test_labels_are_read_where_the_plan_asks_for_classes(tmp_path: Path) -> None:
    path = save(
        tmp_path / "a.npz", images=IMAGES, labels=np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)
    )
    labels = load(path, num_classes=3).label_N
    assert labels is not None
    assert (labels.tolist(), labels.dtype) == ([0, 1, 2, 0, 1, 2], torch.int64)
    assert load(path).label_N is None


def test_labels_outside_the_plans_classes_are_refused(tmp_path: Path) -> None:
    for labels in [[0, 1, 2, 3, 0, 0], [0, -1, 0, 0, 0, 0], [0.0] * 6, ["a"] * 6, [0] * 7, None]:
        with case(labels=labels):
            arrays = {"images": IMAGES} if labels is None else {"images": IMAGES, "labels": labels}
            with pytest.raises(DataError, match="labels"):
                load(save(tmp_path / "a.npz", **arrays), num_classes=3)


def test_a_number_among_the_labels_means_what_the_site_calls_by_it_and_not_what_the_plan_does(
    tmp_path: Path,
) -> None:
    plan = {"num_classes": 3, "class_names": ("malignant", "other", "benign")}
    for labels, own, expected in [
        ([0, 1, 0, 1, 1, 0], Classes(2, ("benign", "malignant")), [2, 0, 2, 0, 0, 2]),
        (
            ["0", "1", "benign", "Malignant", "1", "0"],
            Classes(2, ("benign", "malignant")),
            [2, 0, 2, 0, 0, 2],
        ),
        ([0, 1, 0, 1, 1, 0], Classes(2), [0, 1, 0, 1, 1, 0]),
        ([0, 1, 2, 1, 1, 0], None, [0, 1, 2, 1, 1, 0]),
    ]:
        with case(labels=labels, own=own):
            path = save(tmp_path / "a.npz", images=IMAGES, labels=labels)
            request = {"min_images": 1, "salt": SALT, "unit": "image", "known_classes": own}
            label_N = cohort_at(path, SPEC, **request, **plan).label_N  # type: ignore[arg-type]
            assert label_N is not None and label_N.tolist() == expected


def test_digest_covers_the_grouping_by_patient_and_the_labels_that_are_used(tmp_path: Path) -> None:
    patients = ["a", "b", "a", "c", "b", "a"]
    other = ["a", "b", "a", "c", "b", "c"]
    digests = [
        load(
            save(tmp_path / "a.npz", images=IMAGES, patients=p, labels=label),
            unit=unit,
            num_classes=n,
        ).digest
        for p, label, unit, n in [
            (patients, [0] * 6, "image", None),
            (patients, [0] * 6, "patient", None),
            (other, [0] * 6, "patient", None),
            (patients, [0] * 6, "image", 2),
            (patients, [0] * 5 + [1], "image", 2),
            (patients, [0] * 6, "patient", 2),
        ]
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == dataset_digest(torch.from_numpy(IMAGES), SALT)
    renamed = ["x", "y", "x", "z", "y", "x"]
    assert by_patient(tmp_path, renamed).digest == digests[1]  # the same patients under other names


def test_cohort_takes_volumes_from_an_npz_where_the_plan_asks_for_them_and_there_alone(
    tmp_path: Path,
) -> None:
    array = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 1, 4, 4, 4)
    path = save(tmp_path / "a.npz", images=array)
    spec = DataSpec(shape=(1, 4, 4, 4), range=(-1.0, 1.0))
    cohort = cohort_at(path, spec, min_images=1, salt=SALT, unit="image", num_classes=None)
    assert torch.equal(cohort.images, torch.from_numpy(array))
    with pytest.raises(DataError, check=has_subject("image shape")):
        load(path)


def test_ways_of_spelling_one_patient_are_one_and_leading_zeros_are_not(tmp_path: Path) -> None:
    cohort = by_patient(tmp_path, ["MRN-12", "mrn 12", " Mrn12", "MRN.012", "mrn/12", "m-13"])
    assert cohort.unit_N.tolist() == [0, 0, 0, 1, 0, 2]
    assert by_patient(tmp_path, ["--", "..", "a", "b", "c", "d"]).num_units == 6
