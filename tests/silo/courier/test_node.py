"""What a site's SuperNode is given: an own secret and certificate, a closed port, and one application."""

import ssl
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import main as api
from flwr.supernode import start_client_internal

import aggregator.runtime
from ddm.errors import SetupError
from ddm.transport.own_user import OwnUserMiddleware
from silo.courier import node
from silo.courier.supernode import _PROBLEMS, APPLICATION_REFUSED
from tests.support.errors import has_subject

# Flower builds archives by a pattern of pathspec's that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
FOLDER = Path(aggregator.runtime.__file__).parent / "flower_app"


def connection(content: bytes) -> AbstractContextManager[Any]:
    """Connect as Flower does; the application is `content`."""

    @contextmanager
    def connect(address: str, *, insecure: bool) -> Iterator[tuple[object, ...]]:
        yield (
            42,
            "receive",
            "send",
            "get_run",
            lambda digest, run_id: Fab(digest, content, {}),
            address,
            insecure,
        )

    made: AbstractContextManager[Any] = node.pin_application(connect)("host:1", insecure=False)
    return made


def test_supernode_takes_the_package_s_own_application_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = build_fab_from_disk(FOLDER)
    with connection(own) as (node_id, receive, _, _, get_fab, address, insecure):
        assert (node_id, receive, address, insecure) == (42, "receive", "host:1", False)
        assert get_fab("digest", 1).content == own
    caplog.set_level("ERROR", logger="flwr")
    # The attack: an aggregator that ships code of its own; the courier's user would run it.
    with (
        connection(own.replace(b"client", b"cli3nt")) as (*_, get_fab, _address, _insecure),  # type: ignore[attr-defined]
        pytest.raises(RunNotRunningException),
    ):
        get_fab("digest", 1)
    assert APPLICATION_REFUSED in _PROBLEMS


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
    app = node.close_port(api.create_app)()
    assert any(middleware.cls is OwnUserMiddleware for middleware in app.user_middleware)
    with pytest.raises(SetupError, check=has_subject("flwr")):
        node.replace(ModuleType("flower"), "create_app", None)
