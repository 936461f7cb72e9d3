import json

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ddm.errors import DocumentError
from ddm.transport.flower import _mask, decode_reply, decode_request, encode
from ddm.transport.messages import (
    MAX_BUNDLE_FILES,
    BundleProgress,
    Envelope,
    IndexEntry,
    Offer,
    Pull,
    ReceiptDelivery,
    ReceiptStored,
    Shards,
    Span,
    Status,
    StatusQuery,
    StatusReport,
)
from tests.support.case import case

PLAN = "digits-3f9a1c2e"
FILE = IndexEntry(path="targets/plan.json", num_bytes=6, digest="0" * 64)
SPAN = Span(path="targets/plan.json", offset=0, num_bytes=6)


def raw(document, data=None, **array):
    # A salt of zeros leaves the bytes as they are.
    head = ConfigRecord({"document": json.dumps(document), "salt": bytes(16)})
    records = RecordDict({"head": head})
    if data is not None:
        fields = {
            "dtype": "uint8",
            "shape": (len(data),),
            "stype": "archipelago.bytes",
            "data": data,
            **array,
        }
        records["data"] = ArrayRecord({"bytes": Array(**fields)})
    return records


def test_request_survives_the_wire_when_valid():
    for envelope in [
        Envelope(Offer(plan_id=PLAN, files=(FILE,), spans=(SPAN,)), b"abcdef"),
        Envelope(Offer(plan_id=PLAN, files=(FILE,))),
        Envelope(
            StatusQuery(
                plan_id=PLAN,
                known=Status(state="training", progress=5),
                received=0,
                max_bytes=9,
                wait_s=20,
            )
        ),
        Envelope(Pull(plan_id=PLAN, sequence=1, spans=(SPAN,))),
        Envelope(ReceiptDelivery(plan_id=PLAN, sequence=1), b"{}"),
    ]:
        assert decode_request(encode(envelope), max_bytes=6) == envelope, envelope


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(BundleProgress(missing=(SPAN,))),
        Envelope(
            StatusReport(
                status=Status(state="in_outbox"), sequence=1, files=(FILE,), spans=(SPAN,)
            ),
            b"abcdef",
        ),
        Envelope(Shards(spans=(SPAN, SPAN)), b"abcdefghijkl"),
        Envelope(ReceiptStored(code=23)),
    ],
)
def test_reply_survives_the_wire_when_valid(envelope):
    assert decode_reply(encode(envelope), max_bytes=12) == envelope


@given(pieces=st.lists(st.binary(max_size=40), min_size=1, max_size=8))
@settings(max_examples=50)
def test_pieces_come_back_as_cut_when_sent_as_one_run(pieces):
    spans = tuple(
        Span(path=f"f{i}", offset=0, num_bytes=len(piece)) for i, piece in enumerate(pieces)
    )
    received = decode_reply(encode(Envelope(Shards(spans=spans), b"".join(pieces))), max_bytes=1000)
    assert received.pieces() == pieces


def test_path_is_refused_when_it_could_leave_its_folder():
    for path in [
        "../up",
        "a/../b",
        "/root",
        ".hidden",
        "a/.hidden",
        "a//b",
        "a/",
        "",
        "a\\b",
        "a b",
        "ä",
        "a\n",
        "a/" * 8 + "b",
    ]:
        with case(path=path), pytest.raises(ValidationError):
            Span(path=path, offset=0, num_bytes=0)


@pytest.mark.parametrize("names", [("a", "A"), ("a", "a/b"), ("x/y", "x/y/z")])
def test_index_is_refused_when_two_paths_collide(names):
    with pytest.raises(ValidationError):
        Offer(plan_id=PLAN, files=tuple(IndexEntry(path=name, num_bytes=1) for name in names))


def test_index_is_refused_when_it_lists_too_many_files():
    files = tuple(IndexEntry(path=f"f{i}", num_bytes=1) for i in range(MAX_BUNDLE_FILES + 1))
    Offer(plan_id=PLAN, files=files[:-1])
    with pytest.raises(ValidationError):
        Offer(plan_id=PLAN, files=files)


ASK = {
    "kind": "status_query",
    "plan_id": PLAN,
    "known": {},
    "received": 0,
    "max_bytes": 1,
    "wait_s": 1,
}


def test_request_is_refused_when_a_field_is_not_as_documented():
    for change in [
        {"kind": "exec"},
        {"plan_id": "../etc-00000000"},
        {"plan_id": PLAN + "\n"},
        {"silo_id": "north"},
        {"wait_s": 10**6},
        {"wait_s": True},
        {"received": "0"},
        {"known": {"state": "owned"}},
        {"known": {"progress": 101}},
    ]:
        with case(change=change):
            assert isinstance(decode_request(raw(ASK), max_bytes=1).message, StatusQuery)
            with pytest.raises(DocumentError) as refusal:
                decode_request(raw({**ASK, **change}), max_bytes=1)
            assert "owned" not in str(refusal.value) and "etc" not in str(refusal.value)


def test_data_are_refused_when_they_do_not_fit_their_spans_or_limit():
    for data, array in [
        (b"abcdefg", {}),
        (b"abcde", {}),
        (b"abcdef", {"dtype": "object"}),
        (b"abcdef", {"stype": "numpy.ndarray"}),
        (b"abcdef", {"shape": (2, 3)}),
        (None, {}),
    ]:
        with case(data=data, array=array):
            document = json.loads(Shards(spans=(SPAN,)).model_dump_json())
            assert decode_reply(raw(document, b"abcdef"), max_bytes=6).data == b"abcdef"
            with pytest.raises(DocumentError):
                decode_reply(raw(document, data, **array), max_bytes=6)


def test_head_is_refused_without_a_salt_of_the_right_length():
    for salt in [None, b"", bytes(15), bytes(17), "0" * 16]:
        with case(salt=salt):
            records = raw(ASK)
            records["head"]["salt"] = bytes(16)
            assert isinstance(decode_request(records, max_bytes=1).message, StatusQuery)
            del records["head"]["salt"]
            if salt is not None:
                records["head"]["salt"] = salt
            with pytest.raises(DocumentError):
                decode_request(records, max_bytes=1)


@given(num_bytes=st.integers(1, 3 * 4096))
@settings(max_examples=50)
def test_bytes_of_any_number_come_back_from_under_their_mask(num_bytes):
    data = bytes(index % 251 for index in range(num_bytes))
    masked = _mask(data, bytes(range(16)))
    # The closed form: each byte with the salt's byte at its place, repeated.
    assert masked == bytes(byte ^ (index % 16) for index, byte in enumerate(data))
    assert _mask(masked, bytes(range(16))) == data


def test_no_record_or_chunk_of_a_message_has_a_name_that_another_could_announce():
    """The SuperLink keeps them by digest, and refuses one that was announced before with other parts."""
    offer = Envelope(Offer(plan_id=PLAN, files=(FILE,), spans=(SPAN,)), b"abcdef")
    names = [set(get_all_nested_objects(encode(offer))) for _ in range(2)]
    assert len(names[0]) == len(names[1]) > 4
    assert not names[0] & names[1]


def test_message_is_refused_when_it_holds_other_records():
    records = encode(Envelope(BundleProgress()))
    records["more"] = ConfigRecord({})
    with pytest.raises(DocumentError):
        decode_reply(records, max_bytes=1)


def test_reply_is_refused_when_it_is_a_request():
    with pytest.raises(DocumentError):
        decode_reply(encode(Envelope(Pull(plan_id=PLAN, sequence=1, spans=(SPAN,)))), max_bytes=1)
