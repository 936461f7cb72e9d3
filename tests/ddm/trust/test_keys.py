import hashlib
import io
import os
import secrets
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Signature

from ddm.errors import DocumentError, MissingFileError, PassphraseError, SetupError, SignatureError
from ddm.system.console import passphrase
from ddm.trust.keys import PublicKey, SigningKey, parse_fingerprint
from tests.support.case import case
from tests.support.errors import has_subject


def test_key_signs_the_same_after_a_round_trip_through_its_file(tmp_path):
    key = SigningKey.generate()
    key.save(tmp_path / "k.pem", b"open")
    loaded = SigningKey.load(tmp_path / "k.pem", b"open")
    assert loaded.public == key.public
    loaded.public.verify(key.sign(b"data"), b"data")


def test_key_file_is_encrypted_and_readable_by_its_owner_only_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        SigningKey.generate().save(tmp_path / "k.pem", b"open")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k.pem").stat().st_mode) == 0o600
    assert (tmp_path / "k.pem").read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert [path.name for path in tmp_path.iterdir()] == ["k.pem"]


def test_key_is_never_written_over_another(tmp_path):
    SigningKey.generate().save(tmp_path / "k.pem", b"open")
    before = (tmp_path / "k.pem").read_bytes()
    with pytest.raises(SetupError):
        SigningKey.generate().save(tmp_path / "k.pem", b"open")
    assert (tmp_path / "k.pem").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["k.pem"]


@pytest.mark.parametrize("wrong", [b"shut", b"", b"open "])
def test_key_refuses_a_wrong_passphrase(tmp_path, wrong):
    SigningKey.generate().save(tmp_path / "k.pem", b"open")
    with pytest.raises(PassphraseError) as error:
        SigningKey.load(tmp_path / "k.pem", wrong)
    assert error.value.subject == "k.pem"


def test_key_refuses_to_be_saved_with_an_empty_passphrase(tmp_path):
    with pytest.raises(PassphraseError):
        SigningKey.generate().save(tmp_path / "k.pem", b"")
    assert not (tmp_path / "k.pem").exists()


def test_key_file_missing_is_said_so(tmp_path):
    with pytest.raises(MissingFileError):
        SigningKey.load(tmp_path / "k.pem", b"open")


def test_key_file_refused_when_it_is_not_an_encrypted_ed25519_key(tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    encrypted = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open")
    )
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data in (encrypted, plain, b"hello"):
        (tmp_path / "k.pem").write_bytes(data)
        with pytest.raises(SetupError):
            SigningKey.load(tmp_path / "k.pem", b"open")


def test_public_key_text_round_trips_and_its_fingerprint_is_the_sha256_of_the_raw_bytes():
    public = SigningKey.generate().public
    assert PublicKey.parse(str(public)) == public
    assert public.fingerprint == hashlib.sha256(bytes.fromhex(str(public)[8:])).hexdigest()
    assert public.short.replace(" ", "") == public.fingerprint
    assert parse_fingerprint(public.short.upper()) == public.fingerprint


def test_public_key_refuses_text_in_any_other_form():
    for text in [
        "",
        "ed25519:",
        "ed25519:" + "A" * 64,
        "rsa:" + "a" * 64,
        "ed25519:" + "a" * 64 + "\n",
        "ed25519:" + "a" * 63,
    ]:
        with case(text=text), pytest.raises(DocumentError):
            PublicKey.parse(text)


def test_signature_refused_when_data_signature_or_key_differ():
    key = SigningKey.generate()
    signature = key.sign(b"data")
    attacks = [
        (key.public, signature, b"Data"),
        (SigningKey.generate().public, signature, b"data"),
        (key.public, signature[:-1], b"data"),
        (key.public, bytes([signature[0] ^ 1]) + signature[1:], b"data"),
    ]
    for public, signed, data in attacks:
        with pytest.raises(SignatureError):
            public.verify(signed, data)


def test_tuf_key_takes_our_signatures_and_no_other():
    key = SigningKey.generate()
    public = key.public.tuf_key()
    public.verify_signature(Signature(public.keyid, key.sign(b"data").hex()), b"data")
    with pytest.raises(UnverifiedSignatureError):
        public.verify_signature(Signature(public.keyid, key.sign(b"other").hex()), b"data")


def test_passphrase_is_the_first_line_of_its_file(tmp_path):
    (tmp_path / "pass").write_bytes(b"correct horse \r\nsecond line")
    assert passphrase(tmp_path / "pass", None, "Key") == b"correct horse "


def test_passphrase_refused_when_its_file_is_missing_or_empty(tmp_path):
    with pytest.raises(MissingFileError):
        passphrase(tmp_path / "pass", None, "Key")
    (tmp_path / "pass").write_bytes(b"\nsecond")
    with pytest.raises(PassphraseError):
        passphrase(tmp_path / "pass", None, "Key")


def test_passphrase_names_the_option_when_nobody_can_be_asked(monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115, PTH123
    with pytest.raises(PassphraseError) as error:
        passphrase(None, None, "Key")
    assert "--passphrase-file" in error.value.remedy
    sys.stdin.close()


def test_passphrase_refused_when_the_two_answers_differ_or_are_empty(monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["one", "two", "", "correct horse", "correct horse"])
    prompts = []

    def answer(prompt):
        prompts.append(prompt)
        return next(answers)

    monkeypatch.setattr("getpass.getpass", answer)
    with pytest.raises(PassphraseError):
        passphrase(None, None, "Key", is_new=True)
    with pytest.raises(PassphraseError):
        passphrase(None, None, "Key", is_new=True)
    assert passphrase(None, None, "Key", is_new=True) == b"correct horse"
    assert "12 characters" in prompts[0], "the rule is said before a person chooses"


def test_new_passphrase_is_refused_when_it_is_short_or_repeats_itself(tmp_path, monkeypatch):
    weak_passphrases = [
        b"abc",
        b"correcthors",
        b"aaaaaaaaaaaaaaaaaaaa",
        b"abcabcabcabcabcabc",
        b"123456789012345678",
        b"passwordpassword",
        b"password123456789",
        "\u00e4\u00f6\u00fc".encode() * 2,
    ]
    for weak in weak_passphrases:
        (tmp_path / "pass").write_bytes(weak)
        with case(weak=weak):
            with pytest.raises(PassphraseError, check=has_subject("pass")):
                passphrase(tmp_path / "pass", None, "Key", is_new=True)
            # Keys that somebody has already still open.
            assert passphrase(tmp_path / "pass", None, "Key") == weak
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    with pytest.raises(PassphraseError, check=has_subject("standard input")):
        passphrase(Path("-"), None, "Key", is_new=True)


def test_new_passphrase_is_taken_when_a_machine_drew_it_or_it_is_four_words(tmp_path):
    strong_passphrases = [secrets.token_urlsafe(18).encode() for _ in range(100)]
    strong_passphrases += [secrets.token_hex(16).encode() for _ in range(100)]
    for strong in [*strong_passphrases, b"lamp orbit tulip gravel"]:
        (tmp_path / "pass").write_bytes(strong + b"\n")
        assert passphrase(tmp_path / "pass", None, "Key", is_new=True) == strong


def test_trust_package_loads_neither_torch_nor_flwr():
    program = (
        "import sys, ddm.trust.verify, ddm.trust.repository, ddm.trust.silo_role, ddm.trust.envelope, ddm.io.tensors\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'flwr', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
