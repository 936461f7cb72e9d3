import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm.errors import ArchipelagoError, DocumentError, SignatureError
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey

KEY = SigningKey.generate()
PAYLOAD = b'{"silo_id": "north", "note": "\xc3\xa9\\n"}'
SEALED = seal(PAYLOAD, "card", KEY)


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_envelope_returns_the_payload_byte_for_byte_and_its_signer():
    assert open_sealed(SEALED, "card", KEY.public, 4096) == (PAYLOAD, KEY.public)
    assert open_sealed(SEALED, "card", None, 4096) == (PAYLOAD, KEY.public)


def test_envelope_refused_after_any_one_byte_changes():
    for offset in range(len(SEALED)):
        for flip in (0x01, 0x20, 0x80):
            damaged = bytearray(SEALED)
            damaged[offset] ^= flip
            with pytest.raises((DocumentError, SignatureError)):
                open_sealed(bytes(damaged), "card", KEY.public, 4096)
            with pytest.raises((DocumentError, SignatureError)):
                open_sealed(bytes(damaged), "card", None, 4096)


def test_envelope_refused_when_signed_by_another_key():
    with pytest.raises(SignatureError):
        open_sealed(seal(PAYLOAD, "card", SigningKey.generate()), "card", KEY.public, 4096)


def test_envelope_refused_when_it_claims_a_key_that_did_not_sign_it():
    value = json.loads(SEALED) | {"key": str(SigningKey.generate().public)}
    with pytest.raises(SignatureError):
        open_sealed(canonical(value), "card", None, 4096)


def test_envelope_of_one_kind_refused_as_another_also_when_relabelled():
    with pytest.raises(DocumentError):
        open_sealed(SEALED, "receipt", KEY.public, 4096)
    with pytest.raises(SignatureError):
        open_sealed(
            canonical(json.loads(SEALED) | {"kind": "receipt"}), "receipt", KEY.public, 4096
        )


def test_envelope_refused_when_longer_than_its_limit():
    with pytest.raises(DocumentError):
        open_sealed(SEALED, "card", KEY.public, len(SEALED) - 1)


def test_envelope_refused_in_another_encoding_of_the_same_values():
    value = json.loads(SEALED)
    again = canonical(value)
    assert again == SEALED
    spaced = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    escaped = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    doubled = SEALED[:-1] + b',"kind":"card"}'
    for data in (spaced, escaped, doubled, SEALED + b"\n", b"\xef\xbb\xbf" + SEALED):
        with pytest.raises(DocumentError):
            open_sealed(data, "card", KEY.public, 4096)


@pytest.mark.parametrize(
    "change",
    [{"extra": 1}, {"format": "archipelago/envelope/2"}, {"payload": 3}, {"payload": "\ud800"}],
)
def test_envelope_refused_with_unknown_fields_formats_or_payloads(change):
    data = json.dumps(json.loads(SEALED) | change, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(DocumentError):
        open_sealed(data, "card", KEY.public, 4096)


def test_seal_refuses_a_kind_that_could_blur_into_the_payload_and_a_payload_that_is_no_text():
    for kind in ("card\nx", "", "Card", "card\n"):
        with pytest.raises(DocumentError):
            seal(PAYLOAD, kind, KEY)
    with pytest.raises(DocumentError):
        seal(b"\xff", "card", KEY)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode)
)
def test_envelope_raises_only_our_errors_on_any_bytes(data):
    with pytest.raises(ArchipelagoError):
        open_sealed(data, "card", None, 4096)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.text(max_size=70)
            | st.integers()
            | st.none()
            | st.sampled_from([str(KEY.public), "card", "a" * 128])
            for name in ("format", "kind", "key", "payload", "signature")
        },
    )
)
def test_envelope_raises_only_our_errors_on_any_fields(change):
    data = json.dumps(json.loads(SEALED) | change, sort_keys=True, separators=(",", ":")).encode()
    with contextlib.suppress(ArchipelagoError):
        assert open_sealed(data, "card", None, 4096)[0] == PAYLOAD


@given(st.text().map(str.encode), st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True))
def test_envelope_round_trips_any_text_under_any_kind(payload, kind):
    assert open_sealed(seal(payload, kind, KEY), kind, KEY.public, 100_000)[0] == payload
