"""A node that is let in may send any objects: Flower puts them together as it does, and what comes of it is refused."""

from typing import Any

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.server_app import FlowerCarrier
from ddm.errors import DocumentError, TransportError
from ddm.transport.flower import encode
from tests.strangers.test_logs import message
from tests.support.case import case
from tests.support.mutations import scrambled_bytes
from tests.support.parsers import MAX_SHARD_BYTES, REPLIES

ANSWER = message(encode(REPLIES["report"]))
OBJECTS = {
    object_id: flower_object.deflate()
    for object_id, flower_object in get_all_nested_objects(ANSWER).items()
}
KINDS = {content.split(b" ", 1)[0].decode(): object_id for object_id, content in OBJECTS.items()}
HEAD_END = b"\0"


class _Grid:
    """Puts an answer together from the objects that a node sent, as Flower's own grid does."""

    def __init__(self, top: str, contents: dict[str, bytes]) -> None:
        self._top = top
        self._contents = contents

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        message: Any = inflate_object_from_contents(self._top, dict(self._contents))
        message.metadata.__dict__["_message_id"] = self._top
        return [message]


def fetch(top: str, contents: dict[str, bytes]) -> object:
    return FlowerCarrier(_Grid(top, contents), MAX_SHARD_BYTES).fetch("message")  # type: ignore[arg-type]


def replaced(kind: str, new: bytes) -> tuple[str, dict[str, bytes]]:
    """The objects with one of them exchanged, and every object above it naming the new one."""
    top = ANSWER.object_id
    contents = dict(OBJECTS)
    old = KINDS[kind]
    content = new
    while True:
        fresh = get_object_id(content)
        del contents[old]
        contents[fresh] = content
        if old == top:
            return fresh, contents
        parent = next(one for one, data in contents.items() if old.encode() in data)
        content = contents[parent].replace(old.encode(), fresh.encode())
        old = parent


def test_honest_objects_are_put_together() -> None:
    assert fetch(ANSWER.object_id, OBJECTS) == REPLIES["report"]
    same = replaced("ConfigRecord", OBJECTS[KINDS["ConfigRecord"]])
    assert fetch(*same) == REPLIES["report"]


def test_object_that_is_no_such_object_ends_no_server() -> None:
    for kind in KINDS:
        with case(kind=kind):
            head, _, body = OBJECTS[KINDS[kind]].partition(HEAD_END)
            for spoiled in (
                b"",
                b"\xff" * 40,
                b"{}",
                b"[]",
                b"null",
                body[:-1],
                b"[" * 5000,
                b'{"a":' * 5000,
                b'"\\ud800"',
            ):
                claimed = head.rsplit(b" ", 1)[0] + b" %d" % len(spoiled)
                with pytest.raises((TransportError, DocumentError)):
                    fetch(*replaced(kind, claimed + HEAD_END + spoiled))


def try_objects(kind: str, content: bytes) -> None:
    try:
        envelope = fetch(*replaced(kind, content))
    except (TransportError, DocumentError):
        return
    assert envelope is None or envelope.message.kind == "status_report"  # type: ignore[attr-defined]


def body(kind: str) -> st.SearchStrategy[bytes]:
    """The object with a spoilt body under a head that fits it, as the SuperLink demands."""
    head, _, honest = OBJECTS[KINDS[kind]].partition(HEAD_END)
    start = head.rsplit(b" ", 1)[0]
    return scrambled_bytes(honest).map(
        lambda spoiled: start + b" %d" % len(spoiled) + HEAD_END + spoiled
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_any_object_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    try_objects(kind, data.draw(body(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=3000, suppress_health_check=list(HealthCheck))
def test_any_object_is_read_or_refused_however_long_one_tries(
    kind: str, data: st.DataObject
) -> None:
    try_objects(kind, data.draw(body(kind)))
