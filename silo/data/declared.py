"""Holds a site's data against what policy.toml declares of them; what a plan says plays no part.

Headers and columns are looked at whenever the data are opened, values by `silo scan` and when they are read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from ddm.errors import DataError
from ddm.images.array_files import Source, latents_at, open_arrays, open_images
from ddm.images.columns import read_column
from ddm.images.labels import class_numbers
from ddm.images.rows import blocks
from ddm.protocol.classes import Classes, misnamed
from ddm.protocol.data import DataSpec
from silo.config import DataPolicy, ImagesSettings, Policy
from silo.data.problems import refuse_all
from silo.images.pictures import Pictures

Kind = Literal["arrays", "latents", "pictures"]
_MEND = "Mend the data, or what [data] in policy.toml declares of them; plans are compared with that alone."


def facts_of(path: Path) -> DataPolicy:
    """Return what can be declared of data by their headers; ranges, classes and captions are the site's to say."""
    kind = _kind(path)
    if kind == "pictures":
        return DataPolicy(kind=kind)
    dtype, shape = open_arrays(path).row
    return DataPolicy(kind=kind, shape=shape, range=(-1.0, 1.0) if kind == "arrays" and dtype.kind == "f" else None)


def check_declared(path: Path, policy: Policy) -> None:
    """Check kind, shape, type, number and classes of arrays against the declaration, by headers and columns.

    Raises:
        DataError: everything that does not fit.
    """
    problems: list[DataError] = []
    data = policy.data
    if (kind := _kind(path)) != data.kind and (data.kind or kind == "latents"):
        expected = f"{data.kind or 'a kind'}, as policy.toml declares (data.kind)"
        raise DataError("data", expected=expected, got=kind, remedy=_MEND)
    if (classes := data.known_classes) and classes.names and (wrong := misnamed(classes.names, classes.num)):
        expected = "names of which each means one class, as in a plan"
        raise DataError("classes in policy.toml (data.classes)", expected=expected, got=wrong, remedy=_MEND)
    if data.kind in ("arrays", "latents"):
        source = open_arrays(path)
        problems = [*_header(source, data), *_number(len(source), policy), *_labels(source, classes)]
    refuse_all(problems, _MEND)


def check_values(
    path: Path, policy: Policy, folder: Path, settings: ImagesSettings, advance: Callable[[int], None]
) -> int:
    """Check every value of arrays, and number and classes of pictures, against the declaration; return the number.

    Raises:
        DataError: what does not fit.
    """
    check_declared(path, policy)
    data = policy.data
    if data.kind not in ("arrays", "latents"):
        with Pictures.opened(path, folder, settings, advance) as pictures:
            accepted = [found.label for found in pictures if found.reason is None]
        problems = list(_number(len(accepted), policy))
        if (classes := data.known_classes) and (odd := sum(classes.number(label or "") is None for label in accepted)):
            got = f"others, or none, at {odd} of {len(accepted)} images"
            problems.append(DataError("labels", expected=f"{classes.words()} (data.classes)", got=got))
        refuse_all(problems, _MEND)
        return len(accepted)
    source = open_arrays(path)
    if data.kind == "arrays" and data.range and data.shape:
        shape = data.shape if len(data.shape) > 2 else (1, *data.shape) if len(data.shape) == 2 else (1, 1, *data.shape)
        for _ in blocks(open_images(source, DataSpec(shape=shape, range=data.range), folder.parent)):
            pass
    return len(source)


def _kind(path: Path) -> Kind:
    if latents_at(path) is not None:
        return "latents"
    try:
        dtype, shape = open_arrays(path).row
    except DataError:
        return "pictures"
    plain = (dtype.kind == "f" or dtype in (np.uint8, np.uint16)) and 1 <= len(shape) <= 4 and 0 not in shape
    return "arrays" if plain else "pictures"


def _header(source: Source, data: DataPolicy) -> list[DataError]:
    dtype, shape = source.row
    found = []
    if shape != data.shape:
        found.append(DataError("shape of a row", expected=f"{data.shape} (data.shape)", got=f"{shape}"))
    if source.name == "images" and (dtype.kind == "f") != (data.range is not None):
        whole = "whole numbers: policy.toml has no data.range"
        expected = "floating point, since policy.toml has data.range" if data.range else whole
        found.append(DataError("values", expected=expected, got=str(dtype)))
    if data.captions and "captions" not in source.columns:
        found.append(DataError("captions", expected="a text for each image (data.captions)", got="no such column"))
    return found


def _number(num: int, policy: Policy) -> list[DataError]:
    least = policy.least_images
    expected = f"at least {least} (data.min_images, else training.min_images)"
    return [] if num >= least else [DataError("images", expected=expected, got=f"{num}")]


def _labels(source: Source, classes: Classes | None) -> list[DataError]:
    if classes is None:
        return []
    try:
        class_numbers(read_column(source, "labels"), classes)
    except DataError as error:
        return [error]
    return []
