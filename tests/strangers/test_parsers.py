"""Whatever bytes come: a parsed object that can be written and read again, or the documented refusal, nothing else."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from securesystemslib.formats import encode_canonical

from ddm.errors import DocumentError
from ddm.protocol.base import MAX_INTEGER, Document, check_json
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.mutations import POISON, hostile_bytes, json_paths, scrambled_bytes, with_text
from tests.support.parsers import ParserCase, document_parsers, log_parsers, message_parsers

DOORS = {**document_parsers(), **message_parsers()}
# What a program writes for itself, in a folder that is its own.
OWN = {
    "CheckpointRecord",
    "LogRecord",
    "RemovedRoles",
    "_VersionRecord",
    "RouterReport",
    "SiloKeyRecord",
    "Student",
    "TrainedBaseCard",
}
OWN |= {"Split", "TrainedIsland", "ChainRecord", "ChainHead"}
OWN |= {"FederationDocument"}  # the base of several
quick = settings(max_examples=25, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=2000, suppress_health_check=list(HealthCheck))


def try_door(door: ParserCase, data: bytes) -> None:
    try:
        parsed = door.parse(data)
    except door.refusals:
        return
    if door.encode_parsed:
        assert door.parse(door.encode_parsed(parsed)) == parsed


def test_honest_sample_is_read_and_survives_being_written() -> None:
    for name in DOORS:
        with case(name=name):
            door = DOORS[name]
            parsed = door.parse(door.sample)
            if door.encode_parsed:
                assert door.parse(door.encode_parsed(parsed)) == parsed


def document_kinds(base: type[Document]) -> set[type[Document]]:
    """Return every document of the library, at any depth of inheritance."""
    kinds = set()
    for kind in base.__subclasses__():
        if kind.__module__.startswith("ddm."):
            kinds |= {kind, *document_kinds(kind)}
    return kinds


def test_every_document_of_the_library_is_tried_here_or_never_comes_from_outside() -> None:
    kinds = {kind.__name__ for kind in document_kinds(Document)}
    tried = {type(door.parse(door.sample)).__name__ for door in document_parsers().values()}
    assert {"Plan", "Submission", "Manifest"} <= kinds
    assert not kinds - tried - OWN


@pytest.mark.parametrize("name", DOORS)
@given(data=st.data())
@quick
def test_parser_refuses_strangers_as_documented(name: str, data: st.DataObject) -> None:
    try_door(DOORS[name], data.draw(hostile_bytes(DOORS[name].sample)))


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
@given(data=st.data())
@thorough
def test_parser_refuses_strangers_as_documented_however_long_one_tries(
    name: str, data: st.DataObject
) -> None:
    try_door(DOORS[name], data.draw(hostile_bytes(DOORS[name].sample)))


@pytest.mark.parametrize("name", log_parsers())
@given(data=st.data())
@quick
def test_parser_of_the_log_refuses_strangers_as_documented(name: str, data: st.DataObject) -> None:
    door = log_parsers()[name]
    try_door(door, door.sample)
    door.parse(door.sample)
    try_door(door, data.draw(scrambled_bytes(door.sample) | st.binary(max_size=200)))


@pytest.mark.slow
@pytest.mark.parametrize("name", log_parsers())
@given(data=st.data())
@thorough
def test_parser_of_the_log_refuses_strangers_as_documented_however_long_one_tries(
    name: str, data: st.DataObject
) -> None:
    try_door(
        log_parsers()[name],
        data.draw(scrambled_bytes(log_parsers()[name].sample) | st.binary(max_size=200)),
    )


def every_poison(door: ParserCase, share: int) -> None:
    """Try one poison of every `share` in every place, each time others."""
    value = json.loads(door.sample)
    for number, place in enumerate(json_paths(value)):
        for poison in POISON[number % share :: share]:
            try_door(door, with_text(value, place, poison, sort=True))


def test_parser_refuses_poison_in_every_place_as_documented() -> None:
    for name in DOORS:
        with case(name=name):
            every_poison(DOORS[name], share=10)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_parser_refuses_every_poison_in_every_place_as_documented(name: str) -> None:
    every_poison(DOORS[name], share=1)


def test_parser_refuses_any_byte_cut_off_the_end_and_anything_after_it() -> None:
    for name in DOORS:
        with case(name=name):
            door = DOORS[name]
            for data in (
                door.sample[:-1],
                door.sample + b"{}",
                b"\xef\xbb\xbf" + door.sample,
                door.sample + b"\0",
            ):
                with pytest.raises(door.refusals):
                    door.parse(data)


def test_parser_refuses_a_field_named_twice() -> None:
    for name in DOORS:
        with case(name=name):
            door = DOORS[name]
            first = next(iter(json.loads(door.sample)))
            again = json.dumps({first: json.loads(door.sample)[first]}, separators=(",", ":"))[1:-1]
            with pytest.raises(door.refusals):
                door.parse(door.sample[:-1] + b"," + again.encode() + b"}")


def scalars() -> st.SearchStrategy[Any]:
    # Canonical JSON has no larger integers; a larger number is a float, as test_documents.py says.
    integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
    return st.none() | st.booleans() | integers | st.text(max_size=8)


@given(
    value=st.recursive(
        scalars(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
    )
)
@quick
def test_json_that_an_honest_program_wrote_is_read_as_it_was(value: Any) -> None:
    for ascii_only in (True, False):
        data = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        if "\\ud" not in json.dumps(value):  # half a character is refused in either form
            assert check_json(data, subject="value", limit=10_000) == value


@given(data=st.binary(max_size=60) | st.text('[]{},:"\\ \n1a', max_size=60).map(str.encode))
@settings(max_examples=200)
def test_json_of_strangers_is_refused_or_is_what_the_standard_library_reads(data: bytes) -> None:
    try:
        checked = check_json(data, subject="value", limit=60)
    except DocumentError:
        return
    assert checked == json.loads(data)


def test_request_to_sign_that_names_an_absent_key_is_refused() -> None:
    door = document_parsers()["request to sign"]
    request = json.loads(door.sample)
    root = json.loads(request["payload"])
    del root["keys"][root["roles"]["root"]["keyids"][0]]
    request["payload"] = str(encode_canonical(root))
    with pytest.raises(DocumentError, check=has_subject("root to sign")):
        door.parse(json.dumps(request).encode())
