"""The messages of `ddm.transport.messages` as Flower records, and back, checked.

A record dictionary holds one config record, `head`, with the document as JSON, and, when bytes travel along, one array
record, `data`, with a single flat array of bytes (Flower sends arrays in chunks of 5 MB). Anything else is refused.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
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


def encode(envelope: Envelope[Request | Reply]) -> RecordDict:
    """Pack an envelope into Flower records.

    Args:
        envelope: what to send.

    Returns:
        The records of one Flower message.
    """
    # JSON in one field: Flower's own types would accept fields that no schema of ours checks.
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
    if set(head) != {_DOCUMENT} or not isinstance(document, str) or len(document) > _MAX_HEAD_BYTES:
        raise DocumentError(
            "message head",
            expected=f"one document of at most {_MAX_HEAD_BYTES} characters",
            got="a record of another form",
        )
    data = b""
    if _DATA in names:
        data = _decode_data(records[_DATA], max_bytes)
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
