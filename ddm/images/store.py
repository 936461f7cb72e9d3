"""The cohort on disk: every picture is decoded and transformed once, into one array that all later stages read.

Two files in the site's private folder, named by what they were made of: an npy of the plan's compact type, and, where
the plan needs them, a Parquet table with each row's patient, class and caption. A patient is written as a number, by
first appearance, and with a keyed digest of the identifier, which puts patients into an order that stays when others
join. The table is in place before the array, so that an array is never without it.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.array_files import Name, Source, open_arrays
from ddm.images.geometry import Floats
from ddm.images.parquet import ParquetTable
from ddm.images.patients import MISSING, canonical
from ddm.images.rows import Stored
from ddm.images.transform import Transform
from ddm.images.unpacked import unpacked_path
from ddm.io.files import replacing
from ddm.io.space import require_room

ORDERS = "orders"
_COLUMN = {"patients": "patient", ORDERS: "order", "labels": "label", "captions": "caption"}
_ROWS_AT_ONCE = 4096  # of the table
_ROW_BYTES, _CAPTION_BYTES = 64, 4096  # of the table, at most: two numbers and a digest; a text, most of it ASCII


@dataclass(frozen=True)
class Item:
    """What one picture became.

    Attributes:
        samples: of the plan's shape, float32, in its range: one, or one a slice.
        patient: whose picture it is.
        label: its class.
        caption: its text.
        order: of its patient, see `ddm.images.patients.order_of`.
    """

    samples: Sequence[Floats]
    patient: str | int | float | None = None
    label: int | None = None
    caption: str | None = None
    order: str | None = None


class StoredCohort:
    """The cohort on disk, as a `ddm.images.array_files.Source`.

    Args:
        path: of the array; its table lies beside it, where there is one.
    """

    name: Name = "images"
    recipe = ""

    def __init__(self, path: Path) -> None:
        self._rows: Source = open_arrays(path)
        table = path.with_suffix(".parquet")
        self._table = ParquetTable((table,)) if table.exists() else None
        self.row, self.files = self._rows.row, self._rows.files
        if self._table and self._table.num_rows != len(self):
            got = f"{self._table.num_rows}"
            raise DataError("table of the cohort", expected=f"{len(self)} rows, one an image", got=got)

    def __len__(self) -> int:
        return len(self._rows)

    def in_place(self) -> Stored | None:
        """Return the array."""
        return self._rows.in_place()

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        """Yield all rows in blocks."""
        return self._rows.unpacked()

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the pictures came with."""
        names = self._table.names if self._table else ()
        return frozenset(name for name, cell in _COLUMN.items() if cell in names)

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        """Return one entry for each row.

        Raises:
            DataError: the pictures came without it.
        """
        if self._table is None or name not in self.columns:
            raise DataError(name, expected="an entry for each image", got="images without such a column")
        return self._table.cells(_COLUMN[name], max_bytes)

    def column_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column, one entry for each row."""
        return (len(self),)


def find_cohort(folder: Path, inputs: Iterable[object], transform: Transform) -> StoredCohort | None:
    """Return the cohort that was made of these inputs, None where there is none; one made of anything else is removed.

    Args:
        folder: private to the worker.
        inputs: what tells these inputs from others, as JSON can write it: digests or stamps of the files, and which
            columns are read.
        transform: the plan's.
    """
    with _path(folder, inputs, transform) as path:
        return StoredCohort(path) if path.exists() else None


def _path(folder: Path, inputs: Iterable[object], transform: Transform) -> AbstractContextManager[Path]:
    return unpacked_path(folder, ["cohort", transform.recipe, *inputs])


def store_cohort(
    folder: Path,
    inputs: Iterable[object],
    transform: Transform,
    items: Iterable[Item],
    *,
    most: int,
    captions: bool = True,
) -> StoredCohort:
    """Write a cohort once, in bounded memory, or find it again; `items` is then never begun.

    Args:
        folder: see `find_cohort`.
        inputs: see `find_cohort`.
        transform: the plan's.
        items: in order. All have a patient or none has, and so with class and caption.
        most: no less than the number of images that there will be, for which room must be free.
        captions: whether there may be some, which need room.

    Raises:
        DataError: no image, more than `most`, or an item without what others have.
        DiskError: too little room.
    """
    with _path(folder, inputs, transform) as path:
        if not path.exists():
            row_bytes = transform.data.dim * transform.dtype.itemsize + _ROW_BYTES + captions * _CAPTION_BYTES
            require_room({folder: most * row_bytes}, "the transformed images")
            table = path.with_suffix(".parquet")
            table.unlink(missing_ok=True)  # of an earlier run that came to its end between the two
            with replacing(path, mode=0o600) as handle:
                _write(handle, table, transform, items, most)
        return StoredCohort(path)


def _write(handle: BinaryIO, table: Path, transform: Transform, items: Iterable[Item], most: int) -> None:
    """Write the array and, before it gets its name, the table; the header is written again once its rows are known."""
    num, begin, columns, rows = 0, _write_header(handle, transform, most), None, None
    with ExitStack() as stack:
        for item in items:
            found = _columns(item)
            if columns is None:
                columns = tuple(found)
                rows = stack.enter_context(_table(table, columns)) if columns else None
            if odd := set(columns) ^ set(found):
                got = "one for some of them"
                raise DataError(f"{min(odd)}s", expected="one for each image, or for none", got=got)
            for sample in item.samples:
                if num == most:
                    raise DataError("images", expected=f"at most {most}, as announced", got=f"{most + 1} or more")
                handle.write(np.ascontiguousarray(transform.stored(sample)).reshape(-1).view(np.uint8).data)
                num += 1
            if rows:
                rows.add(found, len(item.samples))
        if not num:
            raise DataError("images", expected="at least one", got="no picture that the plan takes")
    handle.seek(0)
    if _write_header(handle, transform, num) != begin:
        raise DataError("header of the array", expected=f"{begin} bytes", got="another length")


def _write_header(handle: BinaryIO, transform: Transform, num: int) -> int:
    """Write the header of an npy, which has room for numbers of up to 21 digits, and return its length."""
    shape, descr = (num, *transform.data.shape), np.lib.format.dtype_to_descr(transform.dtype)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return handle.write(header.getvalue())


def _columns(item: Item) -> dict[str, Any]:
    given = {"patient": item.patient, "order": item.order, "label": item.label, "caption": item.caption}
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def _table(path: Path, columns: Sequence[str]) -> Iterator["_Rows"]:
    """Yield what collects the rows of a table, which gets its name when the block ends without an error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"patient": pa.int64(), "order": pa.string(), "label": pa.int64(), "caption": pa.string()}
    schema = pa.schema([(name, kinds[name]) for name in columns])
    with replacing(path, mode=0o600) as handle, pq.ParquetWriter(handle, schema) as writer:
        rows = _Rows(writer.write_batch, schema)
        yield rows
        rows.flush()


class _Rows:
    """Collects rows and writes them, some at a time; a patient becomes a number, by first appearance."""

    def __init__(self, write: Callable[[Any], None], schema: Any) -> None:
        self._write, self._schema = write, schema
        self._rows: list[dict[str, Any]] = []
        self._number: dict[bytes, int] = {}

    def add(self, columns: dict[str, Any], num: int) -> None:
        """Add one row, so many times."""
        if "patient" in columns:
            columns = columns | {"patient": self._numbered(columns["patient"])}
        self._rows += [columns] * num
        if len(self._rows) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        import pyarrow as pa

        if self._rows:
            self._write(pa.RecordBatch.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def _numbered(self, patient: str | int | float) -> int:
        text = str(patient).strip()
        if text.lower() in MISSING:
            remedy = "Give every image its patient: one without could belong to a patient who is counted already."
            raise DataError("patients", expected="a patient for each image", got="a blank one", remedy=remedy)
        key = blake2b(canonical(text).encode(), digest_size=16).digest()  # not the name itself, and of one size
        return self._number.setdefault(key, len(self._number))
