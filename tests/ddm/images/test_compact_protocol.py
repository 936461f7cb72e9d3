"""Thrift's compact protocol: what Thrift's own code would read in another way is refused."""

import pytest

from ddm.images.compact_protocol import (
    BINARY,
    I32,
    I64,
    CompactReader,
    ListOf,
    Structure,
)
from ddm.images.reasons import ImageError, Reason
from tests.support.case import case

LAYOUT = Structure({1: I32, 2: ListOf(BINARY), 3: ListOf(Structure({1: I64}, frozenset({1})))})
# Field 1: 10. Field 2: "ab" and "". Field 3: two structures, with -1 and 1.
NUMBER = b"\x15\x14"
TEXTS = b"\x19\x28\x02ab\x00"
ENTRIES = b"\x19\x2c\x16\x01\x00\x16\x02\x00"


def read(data: bytes, max_elements: int = 10) -> object:
    return CompactReader(data, "a structure", max_elements).read(LAYOUT)


def test_fields_that_matter_are_read_and_others_skipped() -> None:
    assert read(NUMBER + TEXTS + ENTRIES + b"\x00") == {1: 10, 2: [], 3: [{1: -1}, {1: 1}]}
    # Behind them: true, a byte, 64 bits of floating point, a set of two truths, and a structure with a list in it.
    others = (
        b"\x31" + b"\x13\x07" + b"\x17" + bytes(8) + b"\x1a\x21\x01\x02" + b"\x1c\x19\x15\x02\x00"
    )
    reader = CompactReader(NUMBER + others + b"\x00" + b"more", "a structure")
    assert reader.read(LAYOUT) == {1: 10}
    assert reader.position == len(NUMBER + others) + 1


def test_bytes_that_thrift_would_read_in_another_way_are_refused() -> None:
    refused = {
        "a field that comes twice": NUMBER + b"\x05\x02\x14",
        # Thrift keeps 16 bits: it would take field 65537 for field 1.
        "a field's number of 17 bits": b"\x05\x82\x80\x08\x14",
        "a field's number below 1": b"\x05\x00\x14",
        # Thrift keeps 32 bits, and would read 10.
        "a number of 33 bits": b"\x15\x94\x80\x80\x80\x10",
        "a field of another type": b"\x16\x14",
        "a list for a number": b"\x19\x05",
        "a list of numbers for texts": NUMBER + b"\x19\x25\x02\x02",
        "a list of texts for structures": NUMBER + TEXTS + b"\x19\x18\x00",
        "an element without its field": NUMBER + TEXTS + b"\x19\x1c\x00",
        "a map": b"\x4b\x00",
        "no type": b"\x4d\x00",
    }
    for name, data in refused.items():
        with case(name), pytest.raises(ImageError) as caught:
            read(data + b"\x00")
        assert caught.value.reason == Reason.DAMAGED


def test_bytes_that_end_early_nest_too_deep_or_announce_too_much_are_refused() -> None:
    whole = NUMBER + TEXTS + ENTRIES + b"\x00"
    for length in range(len(whole)):
        with case(length), pytest.raises(ImageError):
            read(whole[:length])
    deep = b"\x4c" + b"\x1c" * 100
    lists = b"\x49" + b"\x19" * 100
    long = b"\x49\xf5\xff\xff\xff\xff\x07"
    number = b"\x46" + b"\xff" * 11
    for name, data in {"structures": deep, "lists": lists, "long": long, "number": number}.items():
        with case(name), pytest.raises(ImageError):
            read(data + bytes(200))


def test_structures_in_lists_are_counted_together() -> None:
    read(ENTRIES.replace(b"\x19", b"\x39", 1) + b"\x00", max_elements=2)
    with pytest.raises(ImageError) as caught:
        read(ENTRIES.replace(b"\x19", b"\x39", 1) + b"\x00", max_elements=1)
    assert caught.value.reason == Reason.TOO_LARGE


def test_an_empty_list_is_read_whatever_type_it_states() -> None:
    assert read(b"\x29\x00\x00") == {2: []}
    # The control: one element of that type.
    with pytest.raises(ImageError):
        read(b"\x29\x15\x02\x00")
