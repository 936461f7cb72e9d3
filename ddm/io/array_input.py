"""Turns arrays of a caller into tensors: NumPy's, pandas', nested lists, or tensors already.

`torch.as_tensor` takes no negative strides and no foreign byte order, warns of memory that is read-only, and drops a
mask silently; complex numbers lose their imaginary part further on. Whatever can be copied without loss is copied here;
the rest is refused by the name of the caller's argument.
"""

import operator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError, MathError

_EXPECTED = "an array or a tensor of real numbers"
_MAX_INT64 = np.iinfo(np.int64).max
# NumPy's kinds of numbers: truth values, signed and unsigned integers, floating point.
_NUMBER_KINDS = "biuf"
_OTHER_KINDS = {
    "c": "complex numbers",
    "O": "objects",
    "U": "texts",
    "S": "texts",
    "M": "dates",
    "m": "durations",
}


def real_tensor(values: Any, subject: str) -> Tensor:
    """Return values as a tensor; a tensor stays on its device, without its gradient.

    Args:
        values: a tensor, or whatever NumPy makes an array of numbers from.
        subject: the name of the argument, for errors.

    Returns:
        The same shape; bool, whole numbers or floating point. Types that torch computes little with become wider.

    Raises:
        DataError: complex numbers, texts, dates, objects, rows of different lengths, or an array with masked entries.
    """
    if isinstance(values, Tensor):
        return _without_gradient(values, subject)
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise DataError(
            subject,
            expected=f"{_EXPECTED}, all of them valid",
            got="masked entries",
            remedy="Fill them first: array.filled(0).",
        )
    array = _to_array(values, subject)
    return torch.from_numpy(_in_torch_layout(array, subject))


def whole_number(value: Any, subject: str, *, least: int) -> int:
    """Return a whole number; NumPy's and a tensor's are taken, truth values and fractions are not.

    Args:
        value: the value of a caller.
        subject: the name of the argument, for errors.
        least: the least that it may be.

    Raises:
        MathError: no whole number, or one below `least`.
    """
    expected = f"a whole number, at least {least}"
    try:
        number = operator.index(value)
    except TypeError as error:
        raise MathError(subject, expected=expected, got=repr(value)) from error
    if isinstance(value, bool) or number < least:
        raise MathError(subject, expected=expected, got=repr(value))
    return number


def real_number(value: Any, subject: str) -> float:
    """Return a number; NumPy's and a tensor's are taken, truth values and texts are not.

    Args:
        value: of a caller.
        subject: the name of the argument, for errors.

    Raises:
        MathError: no number.
    """
    is_text_or_truth = isinstance(value, str | bytes | bool)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MathError(subject, expected="a number", got=repr(value)) from error
    if is_text_or_truth:
        raise MathError(subject, expected="a number", got=repr(value))
    return number


def _without_gradient(tensor: Tensor, subject: str) -> Tensor:
    if tensor.is_complex() or tensor.is_quantized:
        raise _refusal(subject, f"a tensor of {tensor.dtype}".replace("torch.", ""))
    if tensor.layout is not torch.strided:
        raise _refusal(subject, f"a sparse tensor, {tensor.layout}".replace("torch.", ""))
    return tensor.detach()


def _to_array(values: Any, subject: str) -> NDArray[Any]:
    # A list of tensors would be read by NumPy number by number, or not at all on a GPU.
    if _is_sequence_of_tensors(values):
        values = [_without_gradient(value, subject).cpu().numpy() for value in values]
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(values).__name__}, of which no array can be made"
        raise _refusal(subject, got) from error


def _is_sequence_of_tensors(values: Any) -> bool:
    if not isinstance(values, list | tuple) or not values:
        return False
    return all(isinstance(value, Tensor) for value in values)


def _in_torch_layout(array: NDArray[Any], subject: str) -> NDArray[Any]:
    """Return an array in a type, a byte order and a layout that torch takes."""
    if array.dtype.kind not in _NUMBER_KINDS:
        raise _refusal(subject, _OTHER_KINDS.get(array.dtype.kind, str(array.dtype)))
    dtype = _type_for_torch(array)
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable:
        return array
    return np.array(array, dtype=dtype, order="C", copy=True)


def _type_for_torch(array: NDArray[Any]) -> np.dtype[Any]:
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        # torch computes little with these; what is too large for int64 is rounded as any large number is.
        if array.dtype.itemsize < 8 or int(array.max(initial=0)) <= _MAX_INT64:
            return np.dtype(np.int64)
        return np.dtype(np.float64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return np.dtype(np.float64)
    return array.dtype.newbyteorder("=")


def _refusal(subject: str, got: str) -> DataError:
    remedy = "Convert it first, such as by numpy.asarray(values, dtype=numpy.float32)."
    if "complex" in got:
        remedy = "Take their real parts, or their magnitudes, first."
    return DataError(subject, expected=_EXPECTED, got=got, remedy=remedy)
