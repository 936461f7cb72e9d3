"""What a site's SuperNode is given: an own secret and certificate, and a closed port."""

import ssl
import stat
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode import main as api
from flwr.supernode import start_client_internal

from ddm.errors import SetupError
from ddm.transport.own_user import OwnUserMiddleware
from silo.courier import node
from tests.support.errors import has_subject


def test_secret_and_certificate_are_new_at_every_start_and_nobody_else_reads_them(
    tmp_path: Path,
) -> None:
    files = node.make_secrets(tmp_path)
    paths = (files.secret, files.certificate, files.private_key)
    first = [path.read_bytes() for path in paths]
    assert node.make_secrets(tmp_path) == files
    for path, data in zip(paths, first, strict=True):
        assert path.read_bytes() != data
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(files.certificate, files.private_key)
    context = ssl.create_default_context(cafile=str(files.certificate))
    client = (ssl.MemoryBIO(), ssl.MemoryBIO())
    server = (ssl.MemoryBIO(), ssl.MemoryBIO())
    ends = (
        context.wrap_bio(*client, server_hostname=node.HOST),
        served.wrap_bio(*server, server_side=True),
    )
    for _ in range(4):
        for end, (_, sent), (received, _) in ((ends[0], client, server), (ends[1], server, client)):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
            received.write(sent.read())
    assert ends[0].version() == "TLSv1.3"


def test_flower_s_own_names_are_there_and_a_version_without_them_is_refused() -> None:
    assert hasattr(start_client_internal, "http_request_response")
    assert hasattr(ProtobufClient, "__init__")
    app = node.close_port(api.create_app)()
    assert any(middleware.cls is OwnUserMiddleware for middleware in app.user_middleware)
    with pytest.raises(SetupError, check=has_subject("flwr")):
        node.replace(ModuleType("flower"), "create_app", None)
