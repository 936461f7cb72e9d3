"""Private keys on disk: PKCS #8 (RFC 5958), encrypted under a passphrase by scrypt and AES-256-CBC (RFC 8018).

`BestAvailableEncryption` of the library derives the key of the file with 2,048 rounds of PBKDF2: a passphrase of three
letters falls in seconds to anybody who has a copy. scrypt with the cost below takes a fifth of a second and 16 MiB for
each guess (docs/adr/0076). Every program that reads PKCS #8 opens these files, such as ``openssl pkey``.
"""

import base64
import hashlib
import logging
import os
import stat
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
    load_pem_private_key,
)

from ddm.errors import PassphraseError, SetupError
from ddm.io.files import read_bounded, replacing

MAX_KEY_FILE_BYTES = 16 * 1024
# N, r and p of RFC 7914: one of the settings that OWASP's cheat sheet on password storage gives as equal. Those with
# a larger N take more memory than the command line of OpenSSL allows itself when it opens a key.
_COST = 1 << 14
_BLOCK_SIZE = 8
_PARALLELISM = 5
_KEY_BYTES = 32
_SALT_BYTES = 16
_BLOCK_BYTES = algorithms.AES256.block_size // 8
_BEGIN = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n"
_END = b"-----END ENCRYPTED PRIVATE KEY-----\n"
_PBES2 = x509.ObjectIdentifier("1.2.840.113549.1.5.13")
_SCRYPT = x509.ObjectIdentifier("1.3.6.1.4.1.11591.4.11")
_AES_256_CBC = x509.ObjectIdentifier("2.16.840.1.101.3.4.1.42")

_log = logging.getLogger(__name__)


@asn1.sequence
class _ScryptParameters:
    """RFC 7914, section 7."""

    salt: bytes
    cost: int
    block_size: int
    parallelism: int


@asn1.sequence
class _KeyDerivation:
    algorithm: x509.ObjectIdentifier
    parameters: _ScryptParameters


@asn1.sequence
class _BlockCipher:
    algorithm: x509.ObjectIdentifier
    initialization_vector: bytes


@asn1.sequence
class _Pbes2Parameters:
    """RFC 8018, appendix A.4."""

    key_derivation: _KeyDerivation
    cipher: _BlockCipher


@asn1.sequence
class _Encryption:
    algorithm: x509.ObjectIdentifier
    parameters: _Pbes2Parameters


@asn1.sequence
class _EncryptedPrivateKey:
    """EncryptedPrivateKeyInfo of RFC 5958, section 3, with the algorithms of this file."""

    encryption: _Encryption
    data: bytes


def encrypt_private_key(
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, passphrase: bytes
) -> bytes:
    """Return the PEM file of a private key that only this passphrase opens.

    Raises:
        PassphraseError: the passphrase is empty.
    """
    if not passphrase:
        raise PassphraseError("private key", expected="a passphrase", got="an empty passphrase")
    plain = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    salt = _salt(passphrase)
    initialization_vector = os.urandom(_BLOCK_BYTES)
    encryptor = _cipher(_derive(passphrase, salt), initialization_vector).encryptor()
    padder = PKCS7(algorithms.AES256.block_size).padder()
    padded = padder.update(plain) + padder.finalize()
    derivation = _ScryptParameters(
        salt=salt,
        cost=_COST,
        block_size=_BLOCK_SIZE,
        parallelism=_PARALLELISM,
    )
    parameters = _Pbes2Parameters(
        key_derivation=_KeyDerivation(algorithm=_SCRYPT, parameters=derivation),
        cipher=_BlockCipher(algorithm=_AES_256_CBC, initialization_vector=initialization_vector),
    )
    encrypted = _EncryptedPrivateKey(
        encryption=_Encryption(algorithm=_PBES2, parameters=parameters),
        data=encryptor.update(padded) + encryptor.finalize(),
    )
    # Lines of 64 characters (RFC 7468), which some readers of PEM require.
    text = base64.b64encode(asn1.encode_der(encrypted))
    lines = [text[start : start + 64] + b"\n" for start in range(0, len(text), 64)]
    return _BEGIN + b"".join(lines) + _END


def open_private_key(path: Path, passphrase: bytes) -> PrivateKeyTypes:
    """Open an encrypted private key; a file of an older encryption is encrypted again as new ones are.

    Raises:
        MissingFileError: there is no such file.
        PassphraseError: the passphrase does not open it.
        SetupError: it is not an encrypted private key.
    """
    # Links are followed, since secret stores mount keys as symbolic links.
    path = path.resolve()
    data = read_bounded(path, MAX_KEY_FILE_BYTES, subject=path.name)
    # A key that is not encrypted is refused, or somebody could copy it with the folder.
    if not data.startswith(_BEGIN.rstrip()):
        got = "a file without a private key"
        if b"PRIVATE KEY-----" in data[:64]:
            got = "a private key in another format"
        raise SetupError(
            path.name,
            expected="an encrypted PKCS8 key",
            got=got,
            remedy="Restore the key's file from backup.",
        )
    encrypted = _parse(data)
    try:
        if encrypted is not None:
            return _decrypt(encrypted, passphrase)
        # An empty passphrase would be taken for none, and the library's error would not name the passphrase.
        key = load_pem_private_key(data, passphrase or b"\0")
    except (ValueError, TypeError) as error:
        raise PassphraseError(
            path.name,
            expected="the passphrase of this key",
            got="a passphrase that does not open it",
        ) from error
    if isinstance(key, Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        _encrypt_again(path, data, encrypt_private_key(key, passphrase))
    return key


def _parse(data: bytes) -> _EncryptedPrivateKey | None:
    """Return what the file holds if it was encrypted as this module does it, else None."""
    lines = data.strip().splitlines()
    try:
        encrypted = asn1.decode_der(_EncryptedPrivateKey, base64.b64decode(b"".join(lines[1:-1])))
    except ValueError:
        return None
    derivation = encrypted.encryption.parameters.key_derivation
    parameters = derivation.parameters
    cost = (parameters.cost, parameters.block_size, parameters.parallelism)
    algorithms_used = (
        encrypted.encryption.algorithm,
        derivation.algorithm,
        encrypted.encryption.parameters.cipher.algorithm,
    )
    if cost != (_COST, _BLOCK_SIZE, _PARALLELISM):
        return None
    if algorithms_used != (_PBES2, _SCRYPT, _AES_256_CBC):
        return None
    return encrypted


def _decrypt(encrypted: _EncryptedPrivateKey, passphrase: bytes) -> PrivateKeyTypes:
    """Decrypt a key.

    Raises:
        ValueError: the passphrase is another one, or the file is damaged.
    """
    parameters = encrypted.encryption.parameters
    derived = _derive(passphrase, parameters.key_derivation.parameters.salt)
    decryptor = _cipher(derived, parameters.cipher.initialization_vector).decryptor()
    padded = decryptor.update(encrypted.data) + decryptor.finalize()
    unpadder = PKCS7(algorithms.AES256.block_size).unpadder()
    return load_der_private_key(unpadder.update(padded) + unpadder.finalize(), password=None)


def _encrypt_again(path: Path, old_data: bytes, new_data: bytes) -> None:
    """Replace a key's file by one of the same key, owner and mode, unless another file took its name meanwhile."""
    try:
        before = path.stat()
        with replacing(path, mode=0o600) as handle:
            handle.write(new_data)
            # A command that root runs must not take the key from the user of a service.
            os.fchown(handle.fileno(), before.st_uid, before.st_gid)
            os.fchmod(handle.fileno(), stat.S_IMODE(before.st_mode))
            # A rotation may have put a new key here, which this one must not replace.
            if read_bounded(path, MAX_KEY_FILE_BYTES) != old_data:
                raise FileExistsError(path)
    except (OSError, SetupError):
        # A secret store is often mounted to be read only. The key is open all the same.
        _log.warning(
            "%s is encrypted with a key derivation that is fast to guess, and cannot be replaced here: "
            "docs/how-to/keys.md says how to encrypt it again where it is kept",
            path.name,
        )


def _cipher(key: bytes, initialization_vector: bytes) -> Cipher[modes.CBC]:
    return Cipher(algorithms.AES256(key), modes.CBC(initialization_vector))


# The keys that one command makes have one passphrase, so that one salt for all of them makes no guess cheaper: anybody
# who has one file tries guesses on that one. Several keys then take one derivation to make and to open, in place of
# nine.
@lru_cache(maxsize=8)
def _salt(passphrase: bytes) -> bytes:
    return os.urandom(_SALT_BYTES)


@lru_cache(maxsize=8)
def _derive(passphrase: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(
        passphrase,
        salt=salt,
        n=_COST,
        r=_BLOCK_SIZE,
        p=_PARALLELISM,
        dklen=_KEY_BYTES,
    )
