"""A server in front of which the check stands: a real one, and its own user, another one, and what anybody may post."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from ddm.transport import own_user
from ddm.transport.own_user import OwnUserMiddleware, Receive, Scope, Send
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells whose a connection is"
)
OPEN = {r"/v1/fleet/push-object": 2000, r"/v1/fleet/[a-z-]{1,40}": 1000}
POST = """
import http.client, os, sys
"loaded while it can be".encode("idna")
os.setgroups([])
os.setuid(54321)
port, sizes = int(sys.argv[1]), {"huge": "2001", "large": "1001", "none": None, "small": "1"}
for method, path, size in (line.split() for line in sys.argv[2].split(",")):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path)
    if sizes[size]:
        connection.putheader("Content-Length", sizes[size])
    for value in sys.argv[3:]:
        connection.putheader("X-Forwarded-For", value)
    connection.endheaders(b"x" if size == "small" else None)
    print(connection.getresponse().status)
"""


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer everything with 200."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
def port() -> Iterator[int]:
    """A real server whose fleet is open to all."""
    config = uvicorn.Config(
        OwnUserMiddleware(answer, open_to_all=OPEN),
        host="127.0.0.1",
        port=0,
        lifespan="off",
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def test_own_user_is_answered_on_every_path(port: int) -> None:
    for path in ("/", "/docs", "/v1/runtime/acquire-task", "/v1/fleet/get-fab"):
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_is_answered_where_all_are_and_sends_no_large_body(port: int) -> None:
    expected = {
        "POST /v1/fleet/get-fab small": 200,
        "GET /v1/fleet/get-fab small": 403,
        "POST /v1/fleet/get-fab large": 403,
        "POST /v1/fleet/get-fab none": 403,
        "POST /v1/fleet/push-object large": 200,
        "POST /v1/fleet/push-object huge": 403,
        "POST /v1/fleet/../control/start-run small": 403,
        "POST /v1/fleet/%2e%2e small": 403,
        "POST /v1/control/start-run small": 403,
        "POST /v1/runtime/acquire-task small": 403,
        "GET /docs none": 403,
        "GET /health none": 403,
    }
    command = [sys.executable, "-c", POST, str(port), ",".join(expected)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(expected, map(int, said), strict=True)) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_who_names_a_connection_of_the_own_user_is_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as own:
        named = f"127.0.0.1:{own.getsockname()[1]}"
        command = [sys.executable, "-c", POST, str(port), "POST /v1/runtime/get-fab small", named]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "403"


def test_open_path_is_answered_without_a_look_at_everybodys_connections(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[object] = []
    monkeypatch.setattr(own_user, "user_of", lambda *ends: questions.append(ends))
    assert httpx.post(f"http://127.0.0.1:{port}/v1/fleet/get-fab", content=b"x").status_code == 200
    assert not questions, "the table is as long as strangers make it"
    assert (
        httpx.post(f"http://127.0.0.1:{port}/v1/runtime/get-fab", content=b"x").status_code == 403
    )
    assert len(questions) == 1


def test_request_that_no_address_is_known_of_is_refused() -> None:
    sent: list[object] = []

    async def send(event: object) -> None:
        sent.append(event)

    async def receive() -> dict[str, object]:
        raise AssertionError("no byte of a body is read")

    for scope in (
        {
            "type": "http",
            "client": None,
            "server": None,
            "method": "POST",
            "path": "/",
            "headers": [],
        },
    ):
        with pytest.raises(StopIteration):
            OwnUserMiddleware(answer)(scope, receive, send).__await__().send(None)  # type: ignore[attr-defined, arg-type]
    assert sent[0] == {
        "type": "http.response.start",
        "status": 403,
        "headers": [(b"connection", b"close")],
    }
    with pytest.raises(StopIteration):
        closed = OwnUserMiddleware(answer)({"type": "websocket"}, receive, send)  # type: ignore[arg-type]
        closed.__await__().send(None)  # type: ignore[attr-defined]
    assert sent[-1] == {"type": "websocket.close"}
