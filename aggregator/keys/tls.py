"""Makes the federation's TLS certificates: a certificate authority of its own, and one server certificate."""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ddm.errors import SetupError
from ddm.io.files import require_file, write_atomic
from ddm.trust.key_files import encrypt_private_key, open_private_key

_LIFETIME = timedelta(days=3653)
# Other machines' clocks may be behind.
_BACKDATED = timedelta(days=1)
_LOCAL_HOSTS = ("127.0.0.1", "localhost")
_FILES = ("ca.pem", "ca.key", "server.pem", "server.key")


def make_tls(folder: Path, hosts: Iterable[str], *, passphrase: bytes) -> bytes:
    """Make a certificate authority and a server certificate, P-256, valid for ten years.

    Args:
        folder: where `ca.pem`, `ca.key`, `server.pem`, `server.key` go; keys are readable by their owner only.
        hosts: names and addresses by which silos reach the server; loopback is added.
        passphrase: encrypts `ca.key`, which no running program needs. `server.key` is not encrypted: Flower reads it.

    Returns:
        The authority's certificate, PEM, for the invitation.

    Raises:
        SetupError: one of the files exists, or a host is not a name or an address.
    """
    present = [name for name in _FILES if (folder / name).exists()]
    if present:
        raise SetupError(
            str(folder),
            expected="a folder without certificates",
            got=", ".join(present),
            remedy="Keep these certificates, or remove tls/ to make new ones.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    ca = _make_authority(ca_key)
    server = _make_server_certificate(server_key, ca, ca_key, _alternative_names(hosts))
    # Only `rotate tls` needs the authority's key; a thief of the running server must not get it with the server's.
    _write_key(folder / "ca.key", encrypt_private_key(ca_key, passphrase))
    _write_key(folder / "server.key", _plain_pem(server_key))
    write_atomic(folder / "server.pem", server.public_bytes(Encoding.PEM))
    ca_pem = ca.public_bytes(Encoding.PEM)
    write_atomic(folder / "ca.pem", ca_pem)
    return ca_pem


def renew_server(folder: Path, into: Path, host: str, passphrase: bytes) -> None:
    """Make a new server key and certificate from the same authority, for the same names and for one host.

    Args:
        folder: the present `ca.pem`, `ca.key` and `server.pem`.
        into: where the new `server.key` and `server.pem` go.
        host: to which silos connect; it may be new.
        passphrase: opens `ca.key`.

    Raises:
        MissingFileError: the authority's key was moved away, or a certificate is gone.
        PassphraseError: the passphrase does not open it.
    """
    require_file(
        folder / "ca.key",
        "the authority's key",
        "Bring it back from offline storage for this command.",
    )
    for file_name in ("ca.pem", "server.pem"):
        require_file(
            folder / file_name,
            "a certificate of this federation",
            "Restore tls/ from the backup of this federation.",
        )
    ca_key = open_private_key(folder / "ca.key", passphrase)
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    old = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    # The old names stay: silos connect to an old address until they take the invitation with the new one.
    names = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    for name in _alternative_names([host]):
        if name not in names:
            names.append(name)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise SetupError(
            "ca.key",
            expected="the key of ca.pem",
            got="a key that does not fit it",
            remedy="Restore tls/ca.key from the backup of this federation.",
        )
    # Silos trust the authority, whose certificate came with their invitation, so that a new server key asks nothing
    # of them.
    key = ec.generate_private_key(ec.SECP256R1())
    into.mkdir(parents=True)
    _write_key(into / "server.key", _plain_pem(key))
    certificate = _make_server_certificate(key, ca, ca_key, names)
    write_atomic(into / "server.pem", certificate.public_bytes(Encoding.PEM))


def _alternative_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    # Each name once; an address has another kind of entry than a host name (RFC 5280, 4.2.1.6).
    for host in dict.fromkeys([*hosts, *_LOCAL_HOSTS]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(_dns_name(host))
    return names


def _dns_name(host: str) -> x509.DNSName:
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise SetupError(
            "host",
            expected="a host name in ASCII, or an IP address",
            got=ascii(host[:100]),
        ) from error


def _builder(name: str, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(public_key)
        # Two certificates of one authority must not have the same number (RFC 5280, 4.1.2.2).
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _make_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = "Archipelago federation"
    return (
        _builder(name, key.public_key())
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        # Path length 0: it signs servers, and no further authority.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _make_server_certificate(
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName],
) -> x509.Certificate:
    return (
        _builder("Archipelago aggregator", key.public_key())
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    # The server's key signs handshakes alone, for which TLS 1.3 demands digitalSignature (RFC 8446, 4.4.2.2). Keys
    # are agreed on with others, made for one connection.
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _plain_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_key(path: Path, data: bytes) -> None:
    # The authority's key cannot be made again: without it, every silo needs a new invitation.
    write_atomic(path, data, mode=0o600, overwrite=False)
