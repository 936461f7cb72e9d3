"""The program that runs a site's Flower SuperNode, closed to the other users of its machine.

    python -P silo/courier/node.py FOLDER PORT ARGUMENTS-OF-FLOWER-SUPERNODE...

On its own, a SuperNode hands messages to any program that connects to its port on loopback, and runs whatever
application the aggregator ships. Here the programs that it works with know a secret and its certificate, both new at
every start; the kernel says which user a connection belongs to; and only messages come from the aggregator
(`silo.courier.connection`).
"""

import ipaddress
import resource
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode import fleet_http_connection
from flwr.supernode import main as api
from flwr.supernode import start_client_internal as node
from flwr.supernode.cli.flower_supernode import flower_supernode

from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.transport.flower_log import keep_lines_plain
from ddm.transport.own_user import OwnUserMiddleware
from ddm.transport.superexec import CLIENT_APP, superexec_command
from silo.courier.connection import close_clients, guard_connection, keep_beating

HOST = "127.0.0.1"
# A SuperNode runs for weeks, and a clock may be set meanwhile.
_VALID_BEFORE = timedelta(days=366)
_VALID_AFTER = timedelta(days=3653)
# Of each program. Flower holds a message about three times, and a message has at most 128 MiB.
_MEMORY_BYTES = 2 * 1024**3


def replace(owner: ModuleType | type, name: str, value: object) -> None:
    """Replace a function that Flower calls by this name with one of ours.

    Raises:
        SetupError: this version of Flower has nothing of this name, so that ours would never be called.
    """
    if not hasattr(owner, name):
        raise SetupError(
            "flwr",
            expected=f"{owner.__name__}.{name}",
            got="another version",
            remedy="Install the versions of constraints.txt.",
        )
    # Flower has no setting for any of these checks; `constraints.txt` pins the version that has these names.
    setattr(owner, name, value)


def close_port(create_app: Callable[..., Any]) -> Callable[..., Any]:
    """Let the server that Flower makes answer this user only."""

    # Flower calls this to make its server; the middleware is in front of everything that the server does.
    def create(*arguments: object, **settings: object) -> Any:
        app = create_app(*arguments, **settings)
        app.add_middleware(OwnUserMiddleware)
        return app

    return create


def make_certificate(host: str) -> tuple[bytes, bytes]:
    """Make the certificate by which a site's programs know its SuperNode; it signs itself.

    Args:
        host: the address that it is for.

    Returns:
        The certificate and its private key, PEM.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Archipelago SuperNode")])
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID_BEFORE)
        .not_valid_after(now + _VALID_AFTER)
        # The programs trust it as an authority, since nobody else signs it.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private


@dataclass(frozen=True)
class SecretFiles:
    """The files by which the SuperNode and the programs that it works with know each other.

    Attributes:
        secret: what a program that takes tasks has to know.
        certificate: the SuperNode's.
        private_key: of the certificate.
    """

    secret: Path
    certificate: Path
    private_key: Path


def make_secrets(folder: Path) -> SecretFiles:
    """Make the secret and the certificate of one start, readable by this user only."""
    # New ones at every start: what an earlier SuperNode's programs knew is of no use any more.
    files = SecretFiles(folder / "superexec.secret", folder / "node.pem", folder / "node.key")
    certificate, private_key = make_certificate(HOST)
    write_atomic(files.secret, secrets.token_bytes(32), mode=0o600)
    write_atomic(files.certificate, certificate, mode=0o600)
    write_atomic(files.private_key, private_key, mode=0o600)
    return files


def main(folder: Path, port: int, arguments: list[str]) -> None:
    """Run the SuperNode, and beside it the program that takes its tasks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    keep_lines_plain()
    files = make_secrets(folder)
    # A small message may still name one chunk of bytes many times. Then a program of the courier's fails, and the
    # machine, on which an expert may be training, keeps its memory. Programs that are started here inherit the limit.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    # Before the server starts, so that no connection is made or served without these checks.
    replace(api, "create_app", close_port(api.create_app))
    replace(node, "http_request_response", guard_connection(node.http_request_response))
    replace(ProtobufClient, "__init__", close_clients(ProtobufClient.__init__))
    sender = fleet_http_connection.HeartbeatSender
    replace(fleet_http_connection, "HeartbeatSender", lambda beat: sender(keep_beating(beat)))
    address = f"{HOST}:{port}"
    command = superexec_command(address, files.certificate, files.secret, CLIENT_APP)
    # With `--isolation process`, Flower starts no application itself: this program does, and waits for its SuperNode.
    subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # Flower's command reads its arguments from here.
    sys.argv = [
        "flower-supernode",
        *arguments,
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(files.secret)),
        *("--ssl-certfile", str(files.certificate)),
        *("--ssl-ca-certfile", str(files.certificate)),
        *("--ssl-keyfile", str(files.private_key)),
        *("--host", HOST),
        *("--port", str(port)),
    ]
    flower_supernode()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
