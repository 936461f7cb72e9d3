"""Labels of images as their owner writes them, by name or by number, as classes of a plan."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.protocol.classes import Classes


def class_numbers(
    label_N: NDArray[np.generic], classes: Classes, subject: str = "labels", remedy: str | None = None
) -> NDArray[np.int64]:
    """Return the class of each label, shape (N,); a message never quotes a label, which may be private.

    Args:
        label_N: whole numbers, or text as a table holds it.
        classes: the plan's.
        subject: what errors call the labels.
        remedy: what errors advise.

    Raises:
        DataError: labels of another type or shape, or such as are no classes.
    """
    expected, kind = f"classes of the plan, {classes.words()}", label_N.dtype.kind
    if label_N.ndim != 1 or kind not in "iuUSO":
        got = f"{label_N.dtype}, shape {label_N.shape}"
        raise DataError(subject, expected=f"{expected}, one for each image", got=got, remedy=remedy)
    number_N: NDArray[Any] = label_N if kind in "iu" else _by_name(label_N, classes)
    outside_N = (number_N < 0) | (number_N >= classes.num)
    if num := int(outside_N.sum()):
        raise DataError(subject, expected=expected, got=f"others at {num} of {len(label_N)} images", remedy=remedy)
    return number_N.astype(np.int64)


def _by_name(label_N: NDArray[np.generic], classes: Classes) -> NDArray[np.int64]:
    texts = [each.decode("latin-1") if isinstance(each, bytes) else str(each) for each in label_N.tolist()]
    name_U, place_N = np.unique(texts, return_inverse=True)
    numbers = [classes.number(str(name)) for name in name_U]
    return np.array([-1 if number is None else number for number in numbers], dtype=np.int64)[place_N]
