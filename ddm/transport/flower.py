"""The messages of `ddm.transport.messages` as Flower records, and back, checked.

A record dictionary holds one config record, `head`, with the document as JSON, and, when bytes travel along, one array
record, `data`, with a single flat array of bytes (Flower sends arrays in chunks of 5 MB). Anything else is refused.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import TypeAdapter, ValidationError

from ddm.errors import DocumentError
from ddm.protocol.base import check_json
from ddm.transport.messages import (
    MAX_RECEIPT_BYTES,
    REPLIES,
    REQUESTS,
    Deliver,
    Envelope,
    MessageT,
    Reply,
    Request,
)

_MAX_HEAD_BYTES = 1024 * 1024
_STYPE = "archipelago.bytes"
_HEAD, _DATA, _DOCUMENT, _BYTES = "head", "data", "document", "bytes"


def encode(envelope: Envelope[Request | Reply]) -> RecordDict:
    """Pack an envelope into Flower records.

    Args:
        envelope: what to send.

    Returns:
        The records of one Flower message.
    """
    records = RecordDict({_HEAD: ConfigRecord({_DOCUMENT: envelope.message.model_dump_json()})})
    if envelope.data:
        array = Array(dtype="uint8", shape=(len(envelope.data),), stype=_STYPE, data=envelope.data)
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
    records: RecordDict, adapter: TypeAdapter[MessageT], max_bytes: int
) -> Envelope[MessageT]:
    names = set(records.keys())
    if names not in ({_HEAD}, {_HEAD, _DATA}) or not isinstance(records[_HEAD], ConfigRecord):
        raise DocumentError(
            "message", expected="the records head and data", got=f"{len(names)} records"
        )
    head = dict(records[_HEAD])
    document = head.get(_DOCUMENT)
    if set(head) != {_DOCUMENT} or not isinstance(document, str) or len(document) > _MAX_HEAD_BYTES:
        expected = f"one document of at most {_MAX_HEAD_BYTES} characters"
        raise DocumentError("message head", expected=expected, got="a record of another form")
    data = _data(records[_DATA], max_bytes) if _DATA in names else b""
    check_json(document.encode(), subject="message head", limit=_MAX_HEAD_BYTES)
    try:
        message = adapter.validate_json(document)
    except ValidationError as error:
        # Not the library's text: it quotes what was received.
        raise DocumentError(
            "message", expected="a valid document", got=f"{error.error_count()} errors"
        ) from None
    if isinstance(message, Deliver):
        if not 0 < len(data) <= MAX_RECEIPT_BYTES:
            raise DocumentError(
                "receipt", expected=f"1 to {MAX_RECEIPT_BYTES} bytes", got=str(len(data))
            )
    elif sum(
        span.num_bytes for span in getattr(message, "spans", ()) if message.kind != "pull"
    ) != len(data):
        raise DocumentError(
            "message data", expected="as many bytes as its spans", got=str(len(data))
        )
    return Envelope(message, data)


def _data(record: object, max_bytes: int) -> bytes:
    if not isinstance(record, ArrayRecord) or set(record.keys()) != {_BYTES}:
        raise DocumentError(
            "message data", expected=f"one array called {_BYTES}", got="other records"
        )
    array = record[_BYTES]
    data = array.data
    if array.dtype != "uint8" or array.stype != _STYPE or tuple(array.shape) != (len(data),):
        raise DocumentError(
            "message data", expected="a flat array of bytes", got="an array of another form"
        )
    if not 0 < len(data) <= max_bytes:
        raise DocumentError(
            "message data", expected=f"at most {max_bytes} bytes", got=str(len(data))
        )
    return bytes(data)
