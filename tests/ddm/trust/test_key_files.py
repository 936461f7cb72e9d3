import hashlib
import stat
import subprocess
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from aggregator.config import Federation, FederationSettings
from aggregator.setup import init_federation
from ddm.errors import PassphraseError
from ddm.islands.keys import make_keys
from ddm.publishing.folder import PublisherFolder
from ddm.trust.key_files import encrypt_private_key, open_private_key
from ddm.trust.keys import SigningKey

PASSPHRASE = b"correct horse"


def describe_encryption(path):
    """Say how a key is encrypted, in the words of OpenSSL's own parser."""
    command = ["openssl", "asn1parse", "-in", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def encrypt_as_before(path, passphrase=PASSPHRASE):
    """Write a key as earlier versions encrypted it: 2,048 rounds of PBKDF2."""
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = BestAvailableEncryption(passphrase)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return key


def test_every_key_that_a_federation_and_an_owner_keep_is_slow_to_guess(tmp_path):
    federation = Federation(tmp_path / "fed")
    settings = FederationSettings(name="digits", host="127.0.0.1", port=9092, licence="CC-BY-4.0")
    init_federation(federation, settings, PASSPHRASE)
    (tmp_path / "owner").mkdir()
    make_keys(PublisherFolder(tmp_path / "owner"), PASSPHRASE)
    paths = sorted(tmp_path.rglob("*.key"))
    # Flower and nginx read this one, and cannot ask for a passphrase.
    paths.remove(federation.path / "tls" / "server.key")
    assert len(paths) >= 12
    for path in paths:
        description = describe_encryption(path)
        assert ":scrypt" in description and "PBKDF2" not in description, path.name


def test_guess_takes_longer_than_a_twentieth_of_a_second_of_a_processor(tmp_path):
    SigningKey.generate().save(tmp_path / "k.key", PASSPHRASE)
    begin = time.process_time()
    with pytest.raises(PassphraseError):
        open_private_key(tmp_path / "k.key", b"a wrong guess")
    # 2,048 rounds of PBKDF2 take less than a hundredth of it.
    assert time.process_time() - begin > 0.05


def test_openssl_opens_a_key_and_gives_it_another_passphrase_as_the_documentation_says(tmp_path):
    key = SigningKey.generate()
    key.save(tmp_path / "k.key", PASSPHRASE)
    (tmp_path / "old").write_bytes(PASSPHRASE)
    (tmp_path / "new").write_bytes(b"lamp orbit tulip gravel")
    plain = ["openssl", "pkey", "-in", "k.key", "-passin", "file:old"]
    opened = subprocess.run(plain, cwd=tmp_path, capture_output=True, check=True).stdout
    again = ["openssl", "pkcs8", "-topk8", "-scrypt", "-scrypt_p", "5"]
    again += ["-passout", "file:new", "-out", "k.new"]
    subprocess.run(again, cwd=tmp_path, input=opened, check=True)
    encrypted = (tmp_path / "k.new").read_bytes()
    assert SigningKey.load(tmp_path / "k.new", b"lamp orbit tulip gravel").public == key.public
    assert ":scrypt" in describe_encryption(tmp_path / "k.new")
    assert encrypted != (tmp_path / "k.key").read_bytes()


def test_key_of_the_old_encryption_is_encrypted_again_when_it_is_opened(tmp_path):
    path = tmp_path / "k.key"
    key = encrypt_as_before(path)
    path.chmod(0o640)
    assert "PBKDF2" in describe_encryption(path)
    for _ in range(2):
        opened = open_private_key(path, PASSPHRASE)
        assert opened.private_numbers() == key.private_numbers()
        assert ":scrypt" in describe_encryption(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["k.key"]


def test_key_of_the_old_encryption_stays_when_the_passphrase_is_wrong(tmp_path):
    path = tmp_path / "k.key"
    encrypt_as_before(path)
    before = path.read_bytes()
    for wrong in (b"wrong", b""):
        with pytest.raises(PassphraseError):
            open_private_key(path, wrong)
    assert path.read_bytes() == before


def test_link_to_a_key_stays_a_link_when_the_key_is_encrypted_again(tmp_path):
    (tmp_path / "secrets").mkdir()
    encrypt_as_before(tmp_path / "secrets" / "k.key")
    (tmp_path / "k.key").symlink_to("secrets/k.key")
    open_private_key(tmp_path / "k.key", PASSPHRASE)
    assert (tmp_path / "k.key").is_symlink()
    assert ":scrypt" in describe_encryption(tmp_path / "secrets" / "k.key")


def test_key_that_was_rotated_meanwhile_is_not_replaced_by_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "k.key"
    encrypt_as_before(path)

    def rotate_and_encrypt(key, passphrase):
        path.write_bytes(encrypt_private_key(ec.generate_private_key(ec.SECP256R1()), b"new"))
        return encrypt_private_key(key, passphrase)

    monkeypatch.setattr("ddm.trust.key_files.encrypt_private_key", rotate_and_encrypt)
    old = open_private_key(path, PASSPHRASE)
    assert open_private_key(path, b"new").private_numbers() != old.private_numbers()


def test_key_in_a_folder_that_cannot_be_written_opens_and_a_warning_says_what_to_do(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "k.key"
    encrypt_as_before(path)
    before = hashlib.sha256(path.read_bytes()).digest()

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    # Root, as whom tests often run, may write everywhere.
    with monkeypatch.context() as patched:
        patched.setattr("ddm.trust.key_files.replacing", refuse)
        assert open_private_key(path, PASSPHRASE) is not None
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert "k.key" in caplog.text and "keys.md" in caplog.text
