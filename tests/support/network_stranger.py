"""A stranger on the network of a federation, with nothing but the network.

`python -m tests.support.network_stranger scan ADDRESS...` prints which TCP ports of each address take a connection.
`... ask HOST PORT` says all that a stranger may say there, also with Flower's own clients, and prints the answers.
`... flood HOST PORT` holds as many idle and slow connections as each line of its input names (`1000 0`), opens anew
those that the server closes, and answers each line, once they are held, with their number.
"""

import asyncio
import json
import os
import selectors
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress

from tests.support.intruder import Intruder

EVERY_S = 3.0
BATCH = 2000
TARGETS = (
    "/",
    "/health",
    "/docs",
    "/openapi.json",
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/v1/runtime/pull-messages",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/register-node",
    "/v1/fleet/activate-node",
    "/v1/fleet/pull-messages",
    "/v1/fleet/get-run",
    "/v1/fleet/get-fab",
    "/v1/fleet/nothing",
)
FIELDS = "Host: x\r\nContent-Type: application/protobuf\r\n"
HEAD = f"POST /v1/fleet/pull-messages HTTP/1.1\r\n{FIELDS}".encode()


def open_ports(address: str) -> list[int]:
    """Try all 65,535 ports."""
    ports = []
    for first in range(1, 65536, BATCH):
        ports += _accepting_ports(address, range(first, min(first + BATCH, 65536)))
    return ports


def _accepting_ports(address: str, ports: range) -> Iterator[int]:
    family, _, _, _, end = socket.getaddrinfo(address, 1, type=socket.SOCK_STREAM)[0]
    with selectors.DefaultSelector() as selector:
        for port in ports:
            plain = socket.socket(family, socket.SOCK_STREAM)
            plain.setblocking(False)
            plain.connect_ex((end[0], port, *end[2:]))
            selector.register(plain, selectors.EVENT_WRITE, port)
        # A host that drops what it does not take says nothing: that port is not open either.
        while selector.get_map() and (ready := selector.select(5.0)):
            for key, _ in ready:
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:  # type: ignore[union-attr]
                    yield int(key.data)
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


def unverified_tls() -> ssl.SSLContext:
    """A stranger does not mind whose certificate it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def probe_http(host: str, port: int) -> dict[str, str]:
    """What each request brings; the first without TLS."""
    answers = {
        "plain": _send_request(
            host, port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", tls=False
        )
    }
    for method in ("GET", "POST"):
        for target in TARGETS:
            for body in ("", "abc"):  # an empty message of Flower's is a valid one
                text = f"{method} {target} HTTP/1.1\r\n{FIELDS}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                answers[f"{method} {target} {body}"] = _send_request(
                    host, port, (text + body).encode()
                )
    return answers


def _send_request(host: str, port: int, request: bytes, *, tls: bool = True) -> str:
    received = b""
    with socket.create_connection((host, port), timeout=60.0) as plain:
        connection = plain
        if tls:
            connection = unverified_tls().wrap_socket(plain)
        with suppress(OSError):
            connection.sendall(request)
            while len(received) < 65536 and (piece := connection.recv(65536)):
                received += piece
        if tls:
            connection.close()
    return received.decode("latin-1")


def probe_with_flower(host: str, port: int) -> dict[str, int]:
    """What Flower's own clients get there."""
    intruder = Intruder([port], [])
    intruder.urls = [f"{scheme}://{host}:{port}" for scheme in ("http", "https")]
    intruder.round()
    return intruder.got


class Flood:
    """Connections that are held: idle ones say nothing, slow ones a byte every three seconds.

    Of the idle ones half agree on TLS first. Of ten slow ones four stop in the midst of TLS's first message, five in
    a request's header and one in its body, which nginx passes on to Flower.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.held = 0
        self._tls = unverified_tls()
        self._tasks: dict[str, list[asyncio.Task[None]]] = {"idle": [], "slow": []}

    async def hold(self, kind: str, wanted: int) -> None:
        """Open or close as many as it takes."""
        tasks = self._tasks[kind]
        while len(tasks) > wanted:
            tasks.pop().cancel()
        while len(tasks) < wanted:
            tasks.append(asyncio.create_task(self._always(self._connection(kind, len(tasks)))))
            if len(tasks) % 20 == 0:
                await asyncio.sleep(0.02)

    def _connection(self, kind: str, number: int) -> Callable[[], Coroutine[None, None, None]]:
        if kind == "idle":
            return lambda: self._one(tls=number % 2 == 0)
        if number % 10 < 4:
            return lambda: self._one(tls=False, slowly=_client_hello())
        if number % 10 < 9:
            return lambda: self._one(tls=True, first=HEAD, slowly=b"X-Slow: 1\r\n")
        return lambda: self._one(
            tls=True, first=HEAD + b"Content-Length: 1000000\r\n\r\n", slowly=b"b"
        )

    async def _always(self, connect: Callable[[], Coroutine[None, None, None]]) -> None:
        while True:
            with suppress(OSError):
                await connect()
            await asyncio.sleep(0.1)

    async def _one(self, *, tls: bool, first: bytes = b"", slowly: bytes = b"") -> None:
        context = self._tls if tls else None
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
        self.held += 1
        try:
            writer.write(first)
            position = 0
            while True:
                try:
                    # Not `wait_for`, which in Python 3.11 loses a cancellation that comes together with the answer.
                    async with asyncio.timeout(EVERY_S):
                        answer = await reader.read(4096)
                    if not answer:
                        return
                    # An answer: the server has judged this one, and waits for the next.
                    await asyncio.sleep(EVERY_S)
                    return
                except TimeoutError:
                    if slowly:
                        writer.write(slowly[position % len(slowly) :][:1])
                        position += 1
        finally:
            self.held -= 1
            writer.transport.abort()

    async def run(self) -> None:
        """Obey the lines of the input until it ends."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            numbers = [int(word) for word in line.split()]
            for kind, number in zip(("idle", "slow"), numbers, strict=True):
                await self.hold(kind, number)
            while not 0.9 * sum(numbers) <= self.held <= sum(numbers):
                await asyncio.sleep(0.1)
            print(self.held, flush=True)


def _client_hello() -> bytes:
    incoming = ssl.MemoryBIO()
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        unverified_tls().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def main(verb: str, *arguments: str) -> None:
    """Do one of the three."""
    os.nice(19)  # what a stranger computes is not what the silo has to suffer from
    if verb == "scan":
        print(json.dumps({address: open_ports(address) for address in arguments}))
        return
    host = arguments[0]
    port = int(arguments[1])
    if verb == "ask":
        print(
            json.dumps({"answers": probe_http(host, port), "flower": probe_with_flower(host, port)})
        )
    elif verb == "flood":
        asyncio.run(Flood(host, port).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
