"""A real `ddm serve` on a free port of loopback, and a client of it."""

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddm.system.processes import program
from tests.conftest import PublishedRelease
from tests.support.waiting import LIMIT_S, wait_until

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Service:
    """A running server.

    Attributes:
        process: of `ddm serve`.
        port: where it listens.
        open_requests: connections on which nobody has read the answer yet.
    """

    process: "subprocess.Popen[str]"
    port: int
    open_requests: list[socket.socket] = field(default_factory=list)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send one request and read its answer."""
        return ask(self.port, method, path, body, headers)

    def sample(self, **fields: object) -> Answer:
        """Ask for samples."""
        body, headers = sample_body(fields)
        return self.ask("POST", "/sample", body, headers)

    def begin(self, **fields: object) -> socket.socket:
        """Ask for samples, and leave the answer on its connection."""
        body, headers = sample_body(fields)
        lines = ["POST /sample HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection = socket.create_connection((HOST, self.port), timeout=LIMIT_S)
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        self.open_requests.append(connection)
        return connection

    def leave(self) -> None:
        """Close the connections of all requests that were begun."""
        for connection in self.open_requests:
            connection.close()
        self.open_requests.clear()

    @property
    def health(self) -> dict[str, Any]:
        """What the server says of itself."""
        health: dict[str, Any] = self.ask("GET", "/health").json
        return health

    def wait_for_requests(self, num: int) -> None:
        """Wait until so many requests wait or are answered."""
        wait_until(lambda: self.health["requests"] == num, f"{num} open requests")


def read_answer(connection: socket.socket) -> Answer:
    """Read the answer to a request that was begun."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return _answer(response)


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request to a port of loopback and read its answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body, headers or {})
        return _answer(connection.getresponse())
    finally:
        connection.close()


def _answer(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


def sample_body(fields: dict[str, object]) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request for samples; `label` is the field `class`."""
    names = {name.replace("label", "class"): value for name, value in fields.items()}
    return json.dumps(names).encode(), {"Content-Type": "application/json"}


def serve_command(published: PublishedRelease, state: Path, *words: object) -> list[str]:
    """Return the command line of a server."""
    known = (published.release, "--root", published.root, "--state", state, "--device", "cpu")
    return [str(program("ddm")), "serve", *map(str, known), *map(str, words)]


@contextmanager
def running_service(
    published: PublishedRelease, state: Path, *words: object, port: int = 0
) -> Iterator[Service]:
    """Run a server; kill it at the end if it still runs."""
    process = subprocess.Popen(
        serve_command(published, state, "--port", port, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            assert f"http://{HOST}:" in line, line + process.stderr.read()
            service = Service(process, int(line.rpartition(f"{HOST}:")[2].partition("/")[0]))
            yield service
            service.leave()
        finally:
            process.kill()


def resident_bytes(pid: int) -> int:
    """The memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def seconds_until_closed(connection: socket.socket) -> float:
    """Wait until the server closes a connection; return how long that took."""
    began = time.monotonic()
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began
