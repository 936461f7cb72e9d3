import socket
import ssl
import threading

import pytest
from cryptography import x509

from aggregator.keys.tls import make_tls
from ddm.errors import SetupError


def handshake(server_folder, ca_path, host):
    """Serve one TLS connection and connect to it as `host`, with Python's own verification."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(server_folder / "server.pem", server_folder / "server.key")
    client_side = ssl.create_default_context(cafile=ca_path)
    # The strictest rules that newer Pythons use by default.
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    left, right = socket.socketpair()

    def serve():
        try:
            with server_side.wrap_socket(left, server_side=True) as connection:
                connection.recv(1)
        except (ssl.SSLError, OSError):
            left.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_side.wrap_socket(right, server_hostname=host) as connection:
            return connection.version()
    finally:
        right.close()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "fed.example.org", "192.0.2.7"])
def test_server_is_trusted_when_reached_by_a_listed_host(tmp_path, host):
    make_tls(tmp_path, ["fed.example.org", "192.0.2.7"], passphrase=b"correct horse")
    assert handshake(tmp_path, tmp_path / "ca.pem", host) == "TLSv1.3"


def test_server_is_refused_when_reached_by_another_host(tmp_path):
    make_tls(tmp_path, ["fed.example.org"], passphrase=b"correct horse")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, tmp_path / "ca.pem", "evil.example.org")


def test_server_is_refused_when_another_authority_signed_it(tmp_path):
    make_tls(tmp_path / "a", [], passphrase=b"correct horse")
    make_tls(tmp_path / "b", [], passphrase=b"correct horse")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", tmp_path / "b" / "ca.pem", "localhost")


def test_keys_are_private_and_certificates_last_ten_years_when_made(tmp_path):
    pem = make_tls(tmp_path, [], passphrase=b"long enough")
    assert pem == (tmp_path / "ca.pem").read_bytes()
    assert all(
        (tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in ("ca.key", "server.key")
    )
    assert b"ENCRYPTED" in (tmp_path / "ca.key").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert 3650 <= lifetime.days <= 3660


def test_existing_files_are_kept_when_made_again(tmp_path):
    pem = make_tls(tmp_path, [], passphrase=b"correct horse")
    with pytest.raises(SetupError):
        make_tls(tmp_path, [], passphrase=b"correct horse")
    assert (tmp_path / "ca.pem").read_bytes() == pem
