"""Which npy files of a folder make one array: its parts in the order that people mean, and the columns beside them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ddm.images.column_names import find_column, is_known_column
from ddm.images.reasons import ImageError, Reason

_SUFFIX = ".npy"
_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class NpyFolder:
    """The npy files of a folder that are read together.

    Attributes:
        parts: names of the files that hold the rows, in their order.
        columns: names of the files of each column, by the name without ending: one for all rows, or one for each part.
        is_ordered: whether the names of the parts state an order. Where they state none, the parts are in the order
            of the alphabet, and a column for all rows belongs to nothing.
    """

    parts: tuple[str, ...]
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_ordered: bool = True

    @property
    def files(self) -> tuple[str, ...]:
        """All names: parts, then columns."""
        names = list(self.parts)
        for files in self.columns.values():
            names.extend(files)
        return tuple(names)

    def column_files(self, name: str) -> tuple[str, ...]:
        """Return the files of a column; none where there is no such column.

        Raises:
            ImageError: several columns of this meaning, parts without one, or a column for parts without an order.
        """
        column = find_column(name, self.columns)
        if column is None:
            return ()
        files = self.columns[column]
        is_whole = files[0] == column + _SUFFIX
        if is_whole and len(files) > 1:
            raise ImageError(
                Reason.AMBIGUOUS, "a column for all parts, and the same for one of them: keep one"
            )
        if not is_whole and len(files) != len(self.parts):
            raise ImageError(
                Reason.AMBIGUOUS, "a column for some of the parts: every part needs its own"
            )
        if is_whole and not self.is_ordered:
            detail = "a column for all parts, whose names state no order: number them 1, 2, 3 or 01, 02, 03"
            raise ImageError(Reason.AMBIGUOUS, detail)
        return files


def npy_folder(names: Collection[str], images: str = "images") -> NpyFolder | None:
    """Return the array of a folder, by the names in it; None where it has none.

    Args:
        names: the names of the files in the folder.
        images: what the array is called: ``images.npy``, or ``images-1.npy``, ``images-2.npy`` and so on.

    Raises:
        ImageError: one file for all rows beside files of parts.
    """
    prefix = f"{images}-"
    stems = set()
    for name in names:
        if name.endswith(_SUFFIX):
            stems.add(name.removesuffix(_SUFFIX))
    suffixes = []
    for stem in stems:
        if stem.startswith(prefix):
            suffixes.append(stem.removeprefix(prefix))
    if images in stems:
        if suffixes:
            raise ImageError(
                Reason.AMBIGUOUS, f"{images}.npy beside parts of it: keep one or the other"
            )
        columns: dict[str, tuple[str, ...]] = {}
        for stem in sorted(stems - {images}):
            columns[stem] = (stem + _SUFFIX,)
        return NpyFolder((images + _SUFFIX,), columns)
    if not suffixes:
        return None
    order = numeric_order(suffixes)
    is_ordered = order is not None
    if order is None:
        order = sorted(suffixes)
    parts = tuple(f"{images}-{suffix}{_SUFFIX}" for suffix in order)
    columns = _columns_of_parts(stems, order, images)
    return NpyFolder(parts, columns, is_ordered=is_ordered)


def numeric_order(suffixes: Sequence[str]) -> list[str] | None:
    """Return the suffixes that distinguish parts, in the order of their numbers; None where that is uncertain.

    All must be alike but for their numbers, as ``1, 2, 10``, ``08, 09, 10`` or ``1-of-3, 2-of-3, 3-of-3`` are.
    Numbers are filled with zeros in all names or in none: ``01`` beside ``1`` states no order.
    """
    if len(suffixes) == 1:
        return list(suffixes)
    # Texts and numbers in turn.
    pieces = [_NUMBER.split(suffix) for suffix in suffixes]
    texts_between = {tuple(piece[::2]) for piece in pieces}
    if len(texts_between) != 1:
        return None
    numbers_of_parts = [piece[1::2] for piece in pieces]
    # The first numbers of all parts together, then the second ones.
    for digits in zip(*numbers_of_parts, strict=True):
        # Numbers that are filled with zeros are as wide as the shortest one; others are never wider than they have to
        # be.
        width = min(len(number) for number in digits)
        for number in digits:
            if number != str(int(number)).zfill(width):
                return None
    suffix_of_numbers = {}
    for texts_of_part, suffix in zip(numbers_of_parts, suffixes, strict=True):
        numbers = tuple(int(text) for text in texts_of_part)
        suffix_of_numbers[numbers] = suffix
    # Two parts of the same numbers have no certain order.
    if len(suffix_of_numbers) != len(suffixes):
        return None
    return [suffix_of_numbers[numbers] for numbers in sorted(suffix_of_numbers)]


def _columns_of_parts(
    stems: Collection[str],
    order: Sequence[str],
    images: str,
) -> dict[str, tuple[str, ...]]:
    """Return the files of each column: that of the whole array first, then those of parts, in the order of the parts.

    Raises:
        ImageError: labels, patients or captions of a part that is not there.
    """
    suffixes = frozenset(order)
    whole: dict[str, str] = {}
    of_parts: dict[str, dict[str, str]] = {}
    for stem in sorted(stems):
        column, suffix = _split_name(stem, suffixes)
        if column == images:
            continue
        if suffix:
            of_parts.setdefault(column, {})[suffix] = stem + _SUFFIX
            continue
        first_word, hyphen, _ = stem.partition("-")
        if hyphen and is_known_column(first_word):
            raise ImageError(Reason.AMBIGUOUS, "a column of a part that has no images")
        whole[stem] = stem + _SUFFIX
    columns: dict[str, tuple[str, ...]] = {}
    for column, file in whole.items():
        columns[column] = (file,)
    for column, files in of_parts.items():
        files_in_order = [files[suffix] for suffix in order if suffix in files]
        whole_file = columns.get(column, ())
        columns[column] = (*whole_file, *files_in_order)
    return columns


def _split_name(stem: str, suffixes: Collection[str]) -> tuple[str, str]:
    """Return the column and the part that a name states; no part where it ends with none of them."""
    for match in re.finditer("-", stem):
        suffix = stem[match.end() :]
        if suffix in suffixes:  # of several, the longest
            return stem[: match.start()], suffix
    return stem, ""
