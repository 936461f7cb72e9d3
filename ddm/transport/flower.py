"""The messages of `ddm.transport.messages` as Flower records, and back, checked.

A record dictionary holds one config record, `head`, with the document as JSON and a salt, and, when bytes travel along,
one array record, `data`, with a single flat array of bytes (Flower sends arrays in chunks of 5 MB). Anything else is
refused.

The SuperLink names each record and chunk by its digest, for all nodes alike. The attack: a node announces the name of
what another one is about to be sent, with other parts, so that the SuperLink refuses the real one. The salt, with which
the bytes are masked as well, makes these names unpredictable.
"""

import itertools
import secrets

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from pydantic import TypeAdapter, ValidationError

from ddm.errors import DocumentError
from ddm.protocol.base import check_json
from ddm.protocol.receipt import MAX_RECEIPT_BYTES
from ddm.transport.messages import (
    REPLIES,
    REQUESTS,
    Envelope,
    MessageT,
    Pull,
    ReceiptDelivery,
    Reply,
    Request,
)

_MAX_HEAD_BYTES = 1024 * 1024
_STYPE = "archipelago.bytes"
_HEAD = "head"
_DATA = "data"
_DOCUMENT = "document"
_BYTES = "bytes"
_SALT = "salt"
_SALT_BYTES = 16
_TILE_BYTES = 4096  # masked at a time
# A message of ours has five records and a chunk for every 5 MiB of at most 160 MiB.
MAX_OBJECTS = 64


def has_few_objects(tree: ObjectTree) -> bool:
    """Whether Flower's tree of a message has no more objects than one of ours can have; counts no further."""
    return (
        sum(1 for _ in itertools.islice(iterate_object_tree(tree), MAX_OBJECTS + 1)) <= MAX_OBJECTS
    )


def encode(envelope: Envelope[Request | Reply]) -> RecordDict:
    """Pack an envelope into Flower records.

    Args:
        envelope: what to send.

    Returns:
        The records of one Flower message.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    # JSON in one field: Flower's own types would accept fields that no schema of ours checks.
    head = ConfigRecord({_DOCUMENT: envelope.message.model_dump_json(), _SALT: salt})
    records = RecordDict({_HEAD: head})
    if envelope.data:
        data = _mask(envelope.data, salt)
        array = Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
        records[_DATA] = ArrayRecord({_BYTES: array})
    return records


def decode_request(records: RecordDict, *, max_bytes: int) -> Envelope[Request]:
    """Unpack what the aggregator sent; as `decode_reply`."""
    return _decode(records, REQUESTS, max_bytes)


def decode_reply(records: RecordDict, *, max_bytes: int) -> Envelope[Reply]:
    """Unpack what a courier answered.

    Args:
        records: a received message's content.
        max_bytes: most data bytes accepted beside the document.

    Raises:
        DocumentError: anything about it is not as it must be.
    """
    return _decode(records, REPLIES, max_bytes)


def _decode(
    records: RecordDict,
    adapter: TypeAdapter[MessageT],
    max_bytes: int,
) -> Envelope[MessageT]:
    # Names and types of the records before their content, the document before the bytes: each step trusts the last.
    names = set(records.keys())
    if names not in ({_HEAD}, {_HEAD, _DATA}) or not isinstance(records[_HEAD], ConfigRecord):
        raise DocumentError(
            "message",
            expected="the records head and data",
            got=f"{len(names)} records",
        )
    head = dict(records[_HEAD])
    document = head.get(_DOCUMENT)
    salt = head.get(_SALT)
    if (
        set(head) != {_DOCUMENT, _SALT}
        or not isinstance(document, str)
        or len(document) > _MAX_HEAD_BYTES
        or not isinstance(salt, bytes)
        or len(salt) != _SALT_BYTES
    ):
        raise DocumentError(
            "message head",
            expected=f"a document of at most {_MAX_HEAD_BYTES} characters, and a salt of {_SALT_BYTES} bytes",
            got="a record of another form",
        )
    data = b""
    if _DATA in names:
        data = _mask(_decode_data(records[_DATA], max_bytes), salt)
    check_json(document.encode(), subject="message head", limit=_MAX_HEAD_BYTES)
    try:
        # The adapter knows the kinds of one direction alone: a courier's answer is never taken for a request.
        message = adapter.validate_json(document)
    except ValidationError as error:
        # Not the library's text: it quotes what was received.
        raise DocumentError(
            "message",
            expected="a valid document",
            got=f"{error.error_count()} errors",
        ) from None
    _check_num_bytes(message, len(data))
    return Envelope(message, data)


def _check_num_bytes(message: Request | Reply, num_bytes: int) -> None:
    """Require as many data bytes as the document announces, so that `Envelope.pieces` cuts them all and no more."""
    if isinstance(message, ReceiptDelivery):
        if not 0 < num_bytes <= MAX_RECEIPT_BYTES:
            raise DocumentError(
                "receipt",
                expected=f"1 to {MAX_RECEIPT_BYTES} bytes",
                got=str(num_bytes),
            )
        return
    expected_bytes = 0
    # The spans of a `Pull` are those that it wants, and nothing travels with it.
    if not isinstance(message, Pull):
        expected_bytes = sum(span.num_bytes for span in getattr(message, "spans", ()))
    if num_bytes != expected_bytes:
        raise DocumentError(
            "message data",
            expected="as many bytes as its spans",
            got=str(num_bytes),
        )


def _decode_data(record: object, max_bytes: int) -> bytes:
    if not isinstance(record, ArrayRecord) or set(record.keys()) != {_BYTES}:
        raise DocumentError(
            "message data",
            expected=f"one array called {_BYTES}",
            got="other records",
        )
    array = record[_BYTES]
    data = array.data
    if array.dtype != "uint8" or array.stype != _STYPE or tuple(array.shape) != (len(data),):
        raise DocumentError(
            "message data",
            expected="a flat array of bytes",
            got="an array of another form",
        )
    if not 0 < len(data) <= max_bytes:
        raise DocumentError(
            "message data",
            expected=f"at most {max_bytes} bytes",
            got=str(len(data)),
        )
    return bytes(data)


def _mask(data: bytes, salt: bytes) -> bytes:
    """Combine bytes with a salt, repeated, by exclusive or; the same once more gives them back."""
    masked = np.frombuffer(bytearray(data), np.uint8)
    tile = np.tile(np.frombuffer(salt, np.uint8), _TILE_BYTES // _SALT_BYTES)
    num_tiled = len(data) - len(data) % _TILE_BYTES
    # In place: the bytes are up to a shard, which is in memory twice already.
    tiled = masked[:num_tiled].reshape(-1, _TILE_BYTES)
    tiled ^= tile
    masked[num_tiled:] ^= tile[: len(data) - num_tiled]
    return masked.tobytes()
