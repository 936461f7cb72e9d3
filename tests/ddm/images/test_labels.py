import numpy as np
import pytest

from ddm.errors import DataError
from ddm.images.columns import class_numbers
from ddm.protocol.classes import Classes

CLASSES = Classes(3, ("normal", "Pneumonia", "effusion"))


@pytest.mark.parametrize(
    "labels",
    [
        np.array([2, 0, 1], np.uint8),
        np.array(["effusion", " NORMAL ", "pneumonia"]),
        np.array(["2", "normal", "1.0"]),
        np.array([b"effusion", b"normal", b"pneumonia"]),
        np.array(["effusion", 0, 1], dtype=object),
    ],
)
def test_labels_are_classes_by_name_or_number(labels: np.ndarray) -> None:
    actual = class_numbers(labels, CLASSES)
    assert actual.dtype == np.int64 and actual.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("labels", "got"),
    [
        (np.array(["normal", "DOE^JOHN"]), "others at 1 of 2 images"),
        (np.array([-1, 3, 0]), "others at 2 of 3 images"),
        (np.array([0.0, 1.0]), "float64, shape (2,)"),
        (np.array([[0, 1]]), "int64, shape (1, 2)"),
    ],
)
def test_labels_that_are_no_classes_are_refused_and_never_quoted(
    labels: np.ndarray, got: str
) -> None:
    with pytest.raises(DataError) as refused:
        class_numbers(labels, CLASSES, "column labels", "Mend them.")
    error = refused.value
    assert (
        error.got == got
        and "DOE" not in f"{error} {error.expected}"
        and error.remedy == "Mend them."
    )
    assert "normal, Pneumonia, effusion" in str(error.expected)
