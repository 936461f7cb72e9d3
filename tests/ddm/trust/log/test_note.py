"""Signed notes, verifier keys, checkpoints and cosignatures, as C2SP specifies them."""

import pytest

from ddm.errors import DocumentError, SignatureError, TrustError
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import (
    Checkpoint,
    check_cosignature,
    cosign,
    open_checkpoint,
    sign_checkpoint,
)
from ddm.trust.log.note import (
    COSIGNATURE,
    MAX_NOTE_BYTES,
    MAX_SIGNATURES,
    SignedNote,
    VerifierKey,
    sign_note,
)
from tests.support.case import case
from tests.support.errors import has_subject

# The example of Go's package note, which made the format.
GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
ORIGIN = "archipelago/digits/0123456789abcdef"
KEY = SigningKey.generate()
WITNESS = SigningKey.generate()
VKEY = VerifierKey(ORIGIN, KEY.public)
WITNESS_KEY = VerifierKey("witness.example/w1", WITNESS.public, COSIGNATURE)
CHECKPOINT = Checkpoint(ORIGIN, 20852163, b"\7" * 32)
SIGNED = sign_checkpoint(CHECKPOINT, KEY)


def test_note_of_another_implementation_verifies_and_is_written_as_it_was() -> None:
    note = SignedNote.parse(GO_NOTE.encode(), "note")
    key = VerifierKey.parse(GO_KEY)
    note.check([key], "note")
    assert (note.encode(), str(key)) == (GO_NOTE.encode(), GO_KEY)


def test_note_with_any_changed_byte_of_its_text_or_signature_is_refused() -> None:
    data = GO_NOTE.encode()
    key = VerifierKey.parse(GO_KEY)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with case(at=at), pytest.raises((DocumentError, SignatureError)):
            SignedNote.parse(changed, "note").check([key], "note")


def test_malformed_notes_are_refused() -> None:
    text, line = GO_NOTE.split("\n\n")
    wrong = {
        "no signature": f"{text}\n\n",
        "no text": f"\n\n{line}",
        "no empty line": f"{text}\n{line}",
        "no last newline": GO_NOTE[:-1],
        "control character": GO_NOTE.replace("then", "th\ten"),
        "another line end": GO_NOTE.replace("then", "th\u2028en"),
        "not base64": GO_NOTE.replace("x08go", "x08g!"),
        "short signature": f"{text}\n\n\u2014 PeterNeumann x08gow==\n",
        "plus in a name": GO_NOTE.replace("\u2014 Peter", "\u2014 Pe+er"),
        "another dash": GO_NOTE.replace("\u2014", "-"),
        "too many": f"{text}\n\n" + line * (MAX_SIGNATURES + 1),
        "too long": "a\n" * (MAX_NOTE_BYTES // 2) + "\n" + line,
    }
    for name, note in wrong.items():
        with case(name=name), pytest.raises(DocumentError):
            SignedNote.parse(note.encode(), "note")
    with pytest.raises(DocumentError):
        SignedNote.parse(b"\xff" + GO_NOTE.encode(), "note")


def test_sixteen_signatures_are_read() -> None:
    text, line = GO_NOTE.split("\n\n")
    assert len(SignedNote.parse((f"{text}\n\n" + line * 16).encode(), "note").signatures) == 16


def test_verifier_keys_that_contradict_themselves_are_refused() -> None:
    wrong = [
        "",
        "name",
        GO_KEY.replace("c74f20a3", "c74f20a4"),
        GO_KEY.replace("Peter", "Pieter"),
        GO_KEY.upper(),
        GO_KEY[:-1],
        GO_KEY.replace("+ARpc", "+Axpc"),
        "a" * 5000,
        " +00000000+AAAA",
    ]
    for text in wrong:
        with case(text), pytest.raises(DocumentError):
            VerifierKey.parse(text)
    for key in (VKEY, WITNESS_KEY):
        assert VerifierKey.parse(str(key)) == key
    assert VKEY.key_id != VerifierKey(ORIGIN, KEY.public, COSIGNATURE).key_id


def test_checkpoint_is_read_as_it_was_signed() -> None:
    opened = open_checkpoint(SIGNED.encode(), [VKEY], "checkpoint")
    assert (opened.checkpoint, opened.size, opened.encode()) == (
        CHECKPOINT,
        20852163,
        SIGNED.encode(),
    )


def test_malformed_checkpoints_are_refused_although_the_log_signed_them() -> None:
    root = CHECKPOINT.text.split("\n")[2]
    for text in (
        f"{ORIGIN}\n7\n",
        f"{ORIGIN}\n07\n{root}\n",
        f"{ORIGIN}\n-7\n{root}\n",
        f"{ORIGIN}\n\u0667\n{root}\n",
        f"{ORIGIN}\n{2**63}\n{root}\n",
        f"{ORIGIN}\n7\n{root[:-4]}\n",
        f"{ORIGIN}\n7\n{root}\nmore\n",
        f"\n7\n{root}\n",
    ):
        note = sign_note(text, ORIGIN, KEY)
        with case(text), pytest.raises(DocumentError):
            open_checkpoint(note.encode(), [VKEY], "checkpoint")


def test_checkpoint_by_another_key_or_of_another_log_is_refused() -> None:
    forged = sign_checkpoint(CHECKPOINT, WITNESS)
    with pytest.raises(SignatureError):
        open_checkpoint(forged.encode(), [VKEY], "checkpoint")
    with pytest.raises(SignatureError):
        open_checkpoint(SIGNED.encode(), [], "checkpoint")
    named = VerifierKey(ORIGIN, KEY.public)
    other = sign_note(Checkpoint("another/log", 7, b"\7" * 32).text, ORIGIN, KEY)
    with pytest.raises(TrustError, check=has_subject("checkpoint")):
        open_checkpoint(other.encode(), [named], "checkpoint")


def test_signature_by_the_logs_key_that_does_not_verify_is_refused_beside_one_that_does() -> None:
    second = sign_checkpoint(Checkpoint(ORIGIN, 8, b"\7" * 32), KEY).note.signatures
    note = SignedNote(SIGNED.note.text, SIGNED.note.signatures + second)
    with pytest.raises(SignatureError):
        open_checkpoint(note.encode(), [VKEY], "checkpoint")


def test_cosignature_of_a_witness_counts_for_this_checkpoint_and_time_alone() -> None:
    cosigned = cosign(SIGNED, WITNESS_KEY.name, WITNESS, 1679315147)
    opened = open_checkpoint(cosigned.encode(), [VKEY], "checkpoint")
    assert check_cosignature(opened, WITNESS_KEY, "checkpoint") == 1679315147
    with pytest.raises(SignatureError):
        check_cosignature(SIGNED, WITNESS_KEY, "checkpoint")
    for witness in (
        VerifierKey(WITNESS_KEY.name, KEY.public, COSIGNATURE),
        VerifierKey("other", WITNESS.public),
    ):
        with pytest.raises(SignatureError):
            check_cosignature(opened, witness, "checkpoint")
    # The attacks: the cosignature under another checkpoint, with another time, and cut short.
    line = cosigned.note.signatures[-1]
    later = sign_checkpoint(Checkpoint(ORIGIN, 30000000, b"\7" * 32), KEY)
    shifted = line.signature[:7] + bytes([line.signature[7] ^ 1]) + line.signature[8:]
    for under, signature in (
        (later, line.signature),
        (SIGNED, shifted),
        (SIGNED, line.signature[:-1]),
    ):
        forged = type(line)(line.name, line.key_id, signature)
        note = SignedNote(under.note.text, (*under.note.signatures, forged))
        with pytest.raises(SignatureError):
            check_cosignature(
                open_checkpoint(note.encode(), [VKEY], "c"), WITNESS_KEY, "checkpoint"
            )
