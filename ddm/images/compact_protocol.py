"""Structures of Thrift's compact protocol, read within bounds and in one way only.

The specification: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. pyarrow reads the
same bytes again with Thrift's own code. What was checked here must be what is read there, so whatever Thrift's code
would take for something else is refused: a field that comes twice, a number that has more bits than its type, and a
list of elements of another type than the field has, since Thrift's code never looks at the type that a list states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddm.images.reasons import ImageError, Reason

# Types of the compact protocol.
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

_BITS = {I16: 16, I32: 32, I64: 64}
_MAX_FIELD = (1 << 15) - 1  # Thrift keeps 16 bits of a field's number
_MAX_DEPTH = 16
_LONG_LIST = 15  # in place of a size that follows by itself


@dataclass(frozen=True)
class Structure:
    """A structure of which some fields matter.

    Attributes:
        fields: the types of these by their numbers: a whole number, a list or a structure. All fields that are lists
            must be among them, here and in the structures inside, so that the types of their elements are checked.
        required: the numbers of those that must be there.
    """

    fields: Mapping[int, "int | ListOf | Structure"]
    required: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ListOf:
    """A list.

    Attributes:
        element: its elements' type; elements that are no `Structure` are skipped.
    """

    element: int | Structure


class CompactReader:
    """Reads structures one after the other.

    Args:
        data: where they are, and maybe more.
        subject: what they are, for errors.
        max_elements: the most structures that all lists of them may hold together.
    """

    def __init__(
        self,
        data: bytes,
        subject: str,
        max_elements: int = 0,
    ) -> None:
        self._data = data
        self._subject = subject
        self._max_elements = max_elements
        self._num_elements = 0
        self.position = 0

    def read(self, layout: Structure) -> dict[int, Any]:
        """Return the fields of `layout` that are there, by number: of a list of structures, their fields.

        Raises:
            ImageError: bytes that are not such structure, or that Thrift's code might read in another way; or lists
                that are too long.
        """
        try:
            return self._structure(layout, 0)
        except (IndexError, RecursionError):
            raise ImageError(Reason.DAMAGED, self._subject) from None

    # Below, whatever ends early or is not allowed is an IndexError, and what is nested too deep a RecursionError.

    def _structure(self, layout: Structure, depth: int) -> dict[int, Any]:
        if depth > _MAX_DEPTH:
            raise RecursionError
        values: dict[int, Any] = {}
        numbers: set[int] = set()
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                break
            number = self._field_number(head, number)
            # Of a field that comes twice, Thrift's code takes the last.
            if number in numbers:
                raise IndexError
            numbers.add(number)
            kind = head & 0x0F
            field_type = layout.fields.get(number)
            if field_type is None:
                self._skip(kind, depth)
            else:
                values[number] = self._value(kind, field_type, depth)
        if not layout.required.issubset(values):
            raise IndexError
        return values

    def _field_number(self, head: int, last: int) -> int:
        # The upper half of the byte is the step from the last field, or 0 before a number of its own.
        step = head >> 4
        if step:
            number = last + step
        else:
            number = self._signed(I16)
        if not 0 < number <= _MAX_FIELD:
            raise IndexError
        return number

    def _value(
        self,
        kind: int,
        field_type: int | ListOf | Structure,
        depth: int,
    ) -> Any:
        """Read a field that matters; Thrift's code would skip it if it were of another type."""
        if isinstance(field_type, Structure):
            if kind != STRUCT:
                raise IndexError
            return self._structure(field_type, depth + 1)
        if isinstance(field_type, ListOf):
            if kind != LIST:
                raise IndexError
            return self._list(field_type.element, depth + 1)
        if kind != field_type:
            raise IndexError
        return self._signed(kind)

    def _list(self, element: int | Structure, depth: int) -> list[dict[int, Any]]:
        kind, size = self._list_head()
        # Some writers state no type, or another one, where there is no element.
        if size == 0:
            return []
        if isinstance(element, Structure):
            if kind != STRUCT:
                raise IndexError
            self._count_elements(size)
            return [self._structure(element, depth + 1) for _ in range(size)]
        if kind != element:
            raise IndexError
        self._skip_elements(kind, size, depth)
        return []

    def _count_elements(self, num: int) -> None:
        """Refuse lists that take much memory here, and in Thrift's code, which allocates them before it reads them."""
        self._num_elements += num
        if self._num_elements > self._max_elements:
            got = f"more than {self._max_elements} entries in {self._subject}"
            raise ImageError(Reason.TOO_LARGE, got)

    def _list_head(self) -> tuple[int, int]:
        """Return the type and the number of a list's elements."""
        head = self._byte()
        size = head >> 4
        if size == _LONG_LIST:
            size = self._unsigned(32)
        # Each element takes a byte at least.
        if size > len(self._data) - self.position:
            raise IndexError
        return head & 0x0F, size

    def _skip(self, kind: int, depth: int) -> None:
        if kind in _BITS:
            self._unsigned(_BITS[kind])
        elif kind == BINARY:
            self._advance(self._unsigned(32))
        elif kind == STRUCT:
            self._skip_structure(depth + 1)
        elif kind == BYTE:
            self._advance(1)
        elif kind == DOUBLE:
            self._advance(8)
        elif kind in (LIST, SET):
            element_kind, size = self._list_head()
            self._skip_elements(element_kind, size, depth + 1)
        elif kind not in (TRUE, FALSE):  # a map, of which Parquet has none, or no type
            raise IndexError

    def _skip_structure(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise RecursionError
        number = 0
        # A field that comes twice takes the same bytes, and none of them matters.
        while True:
            head = self._byte()
            if head == 0:
                return
            number = self._field_number(head, number)
            self._skip(head & 0x0F, depth)

    def _skip_elements(
        self,
        kind: int,
        size: int,
        depth: int,
    ) -> None:
        if depth > _MAX_DEPTH:
            raise RecursionError
        if kind in (TRUE, FALSE):
            kind = BYTE  # in a list, true and false take a byte
        for _ in range(size):
            self._skip(kind, depth)

    def _advance(self, num: int) -> None:
        self.position += num
        if self.position > len(self._data):
            raise IndexError

    def _byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _unsigned(self, bits: int) -> int:
        value = 0
        # Seven bits a byte.
        for shift in range(0, bits, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                # Thrift's code drops the bits that are too many.
                if value >> bits:
                    raise IndexError
                return value
        raise IndexError

    def _signed(self, kind: int) -> int:
        value = self._unsigned(_BITS[kind])
        # Zigzag: 0, -1, 1, -2 are stored as 0, 1, 2, 3.
        return (value >> 1) ^ -(value & 1)
