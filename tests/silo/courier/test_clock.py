"""The hint about a wrong clock: from a real TLS server whose certificate nobody signed for us."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aggregator.keys.tls import make_tls
from ddm.system.processes import free_port
from silo.courier.clock import describe, seconds_ahead


@contextmanager
def server(folder: Path, date: str | None) -> Iterator[str]:
    """An HTTPS server that states a date of its own."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            if date is not None:
                self.send_header("Date", date)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    make_tls(folder, ["127.0.0.1"], passphrase=b"correct horse")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as served:
        served.daemon_threads = True
        # TLS is agreed in a request's own thread, so that a stranger who finds this port keeps nobody waiting.
        served.socket = context.wrap_socket(
            served.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


@pytest.mark.parametrize("days", [-2, 0, 2])
def test_clock_is_compared_with_the_aggregators(tmp_path: Path, days: int) -> None:
    with server(
        tmp_path / "tls", format_datetime(datetime.now(UTC) - timedelta(days=days), usegmt=True)
    ) as address:
        ahead = seconds_ahead(address)
    assert ahead == pytest.approx(days * 86400, abs=30)
    description = describe(ahead)
    assert (description is None) == (days == 0)
    if description:
        assert f"2.0 days {'ahead of' if days > 0 else 'behind'} the aggregator's" in description


@pytest.mark.parametrize("date", [None, "yesterday", "Mon, 99 Nov 2026 99:00:00 GMT"])
def test_clock_stays_unknown_when_a_stranger_answers_nonsense(
    tmp_path: Path, date: str | None
) -> None:
    with server(tmp_path / "tls", date) as address:
        assert seconds_ahead(address) is None
    assert describe(None) is None


def test_clock_stays_unknown_when_nobody_answers() -> None:
    assert seconds_ahead(f"127.0.0.1:{free_port()}") is None
