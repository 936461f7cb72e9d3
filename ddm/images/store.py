"""The cohort on disk: every picture is decoded and transformed once, into one array that all later stages read.

Two files in the site's private folder, named by what they were made of: an npy of the plan's compact type, and, if the
plan needs them, a Parquet table with patient, class and caption of each row. A patient is stored as a number, by first
appearance, and with a keyed digest of the identifier, which puts patients into an order that stays when others join.
The table is in place before the array, so that an array is never without it.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays, open_arrays
from ddm.images.array_source import Name
from ddm.images.geometry import Floats
from ddm.images.parquet import ParquetTable
from ddm.images.patients import canonical, is_missing
from ddm.images.rows import StoredArray
from ddm.images.transform import Transform
from ddm.images.types import Shape, Values
from ddm.images.unpacked import unpacked_path
from ddm.io.files import replacing
from ddm.io.space import require_free_space

ORDERS = "orders"
_COLUMN_NAMES = {"patients": "patient", ORDERS: "order", "labels": "label", "captions": "caption"}
_ROWS_AT_ONCE = 4096  # of the table
_ROW_BYTES = 64  # of the table, at most: two numbers and a digest
_CAPTION_BYTES = 4096  # of the table, at most: a text, most of it ASCII


@dataclass(frozen=True)
class Item:
    """What one picture became.

    Attributes:
        samples: the samples of the plan's shape, float32, in its range: one, or one for each slice.
        patient: the patient of the picture.
        label: number of its class.
        caption: its text.
        order: secret rank of its patient, see `ddm.images.patients.order_of`.
    """

    samples: Sequence[Floats]
    patient: str | int | float | None = None
    label: int | None = None
    caption: str | None = None
    order: str | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """What is known of the picture, by the names of the table's columns."""
        columns = {
            "patient": self.patient,
            "order": self.order,
            "label": self.label,
            "caption": self.caption,
        }
        return {name: value for name, value in columns.items() if value is not None}


class StoredCohort:
    """The cohort on disk, as `ddm.images.array_files.ImageArrays`.

    Args:
        path: the path of the array; its table is beside it, if there is one.
    """

    name: Name = "images"
    recipe = ""

    def __init__(self, path: Path) -> None:
        self._rows: ImageArrays = open_arrays(path)
        self.row = self._rows.row
        self.files = self._rows.files
        table_path = path.with_suffix(".parquet")
        self._table = None
        if table_path.exists():
            self._table = ParquetTable((table_path,))
        if self._table is not None and self._table.num_rows != len(self):
            got = f"{self._table.num_rows}"
            raise DataError(
                "table of the cohort",
                expected=f"{len(self)} rows, one for each image",
                got=got,
            )

    def __len__(self) -> int:
        return len(self._rows)

    def in_place(self) -> StoredArray | None:
        """Return the array."""
        return self._rows.in_place()

    def unpacked(self) -> Iterator[Values]:
        """Yield all rows in blocks."""
        return self._rows.unpacked()

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the pictures came with."""
        if self._table is None:
            return frozenset()
        return frozenset(name for name, cell in _COLUMN_NAMES.items() if cell in self._table.names)

    def column(self, name: str, max_bytes: int) -> Values:
        """Return one entry for each row.

        Raises:
            DataError: the pictures came without it.
        """
        if self._table is None or name not in self.columns:
            raise DataError(
                name,
                expected="an entry for each image",
                got="images without such a column",
            )
        return self._table.cells(_COLUMN_NAMES[name], max_bytes)

    def column_shape(self, name: str) -> Shape:
        """Return the shape of a column, one entry for each row."""
        return (len(self),)


def find_cohort(
    folder: Path,
    inputs: Iterable[object],
    transform: Transform,
) -> StoredCohort | None:
    """Return the cohort that was made of these inputs, None if there is none; one made of other inputs is removed.

    Args:
        folder: private to the worker.
        inputs: tell these inputs from others, as JSON can write it: digests of the files, and which columns are read.
        transform: the plan's.
    """
    with _cohort_path(folder, inputs, transform) as path:
        if not path.exists():
            return None
        return StoredCohort(path)


def store_cohort(
    folder: Path,
    inputs: Iterable[object],
    transform: Transform,
    items: Iterable[Item],
    *,
    max_images: int,
    captions: bool = True,
) -> StoredCohort:
    """Write a cohort once, in bounded memory, or find it again; `items` is then never begun.

    Args:
        folder: see `find_cohort`.
        inputs: see `find_cohort`.
        transform: the plan's.
        items: in order. All have a patient or none has; the same holds for class and caption.
        max_images: no fewer than there will be; the disk must have space for them.
        captions: whether there may be some, which need space.

    Raises:
        DataError: no image, more than `max_images`, or an item without what others have.
        DiskError: too little space.
    """
    with _cohort_path(folder, inputs, transform) as path:
        if not path.exists():
            row_bytes = transform.data.dim * transform.dtype.itemsize + _ROW_BYTES
            if captions:
                row_bytes += _CAPTION_BYTES
            require_free_space({folder: max_images * row_bytes}, "the transformed images")
            table_path = path.with_suffix(".parquet")
            # An earlier run may have been killed between the table and the array.
            table_path.unlink(missing_ok=True)
            with replacing(path, mode=0o600) as handle:
                _write_cohort(handle, table_path, transform, items, max_images)
        return StoredCohort(path)


def _cohort_path(
    folder: Path,
    inputs: Iterable[object],
    transform: Transform,
) -> AbstractContextManager[Path]:
    return unpacked_path(folder, ["cohort", transform.recipe, *inputs])


def _write_cohort(
    handle: BinaryIO,
    table_path: Path,
    transform: Transform,
    items: Iterable[Item],
    max_images: int,
) -> None:
    """Write the array and, before it gets its name, the table.

    The number of rows is known only at the end: the header, whose length does not depend on it, is written again then.
    """
    header_bytes = _write_header(handle, transform, max_images)
    num_images = 0
    columns: tuple[str, ...] | None = None
    table_writer: _TableWriter | None = None
    with ExitStack() as stack:
        for item in items:
            item_columns = item.columns
            if columns is None:
                columns = tuple(item_columns)
                if columns:
                    table_writer = stack.enter_context(_open_table(table_path, columns))
            different = set(columns) ^ set(item_columns)
            if different:
                expected = "one for each image, or for none"
                raise DataError(f"{min(different)}s", expected=expected, got="one for some of them")
            for sample in item.samples:
                if num_images == max_images:
                    raise DataError(
                        "images",
                        expected=f"at most {max_images}, as announced",
                        got=f"{max_images + 1} or more",
                    )
                stored = np.ascontiguousarray(transform.stored(sample))
                handle.write(stored.reshape(-1).view(np.uint8).data)
                num_images += 1
            if table_writer is not None:
                table_writer.add(item_columns, len(item.samples))
        if not num_images:
            raise DataError(
                "images",
                expected="at least one",
                got="no image",
                remedy="`silo scan SITE` says why no picture can be used.",
            )
    handle.seek(0)
    if _write_header(handle, transform, num_images) != header_bytes:
        raise DataError(
            "header of the array",
            expected=f"{header_bytes} bytes",
            got="another length",
        )


def _write_header(
    handle: BinaryIO,
    transform: Transform,
    num_images: int,
) -> int:
    """Write the header of an npy, which has space for numbers of up to 21 digits, and return its length."""
    header = {
        "descr": np.lib.format.dtype_to_descr(transform.dtype),
        "fortran_order": False,
        "shape": (num_images, *transform.data.shape),
    }
    encoded = io.BytesIO()
    np.lib.format.write_array_header_1_0(encoded, header)
    return handle.write(encoded.getvalue())


@contextmanager
def _open_table(path: Path, columns: Sequence[str]) -> Iterator["_TableWriter"]:
    """Yield what collects the rows of a table; the table gets its name when the block ends without an error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "patient": pa.int64(),
        "order": pa.string(),
        "label": pa.int64(),
        "caption": pa.string(),
    }
    schema = pa.schema([(name, types[name]) for name in columns])
    with replacing(path, mode=0o600) as handle, pq.ParquetWriter(handle, schema) as writer:
        rows = _TableWriter(writer.write_batch, schema)
        yield rows
        rows.flush()


class _TableWriter:
    """Collects rows and writes them, some at a time; a patient becomes a number, by first appearance."""

    def __init__(self, write: Callable[[Any], None], schema: Any) -> None:
        self._write = write
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._patient_numbers: dict[bytes, int] = {}

    def add(self, columns: dict[str, Any], num_rows: int) -> None:
        """Add the same row, this many times."""
        if "patient" in columns:
            columns = columns | {"patient": self._patient_number(columns["patient"])}
        self._rows += [columns] * num_rows
        if len(self._rows) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        import pyarrow as pa

        if self._rows:
            self._write(pa.RecordBatch.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def _patient_number(self, patient: str | int | float) -> int:
        text = str(patient).strip()
        if is_missing(text):
            remedy = "Give every image its patient: one without could belong to a patient who is counted already."
            raise DataError(
                "patients",
                expected="a patient for each image",
                got="a blank one",
                remedy=remedy,
            )
        # A digest instead of the name: memory then holds no names, and all keys have one size.
        digest = blake2b(canonical(text).encode(), digest_size=16).digest()
        return self._patient_numbers.setdefault(digest, len(self._patient_numbers))
