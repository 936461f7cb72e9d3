"""Counts the bytes through a port, with a relay that does not interpret them."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self


class Relay:
    """Listens on a port of loopback and passes every connection on to another one, counting both ways.

    Counts what TCP carries, TLS and HTTP included; the headers of TCP and IP, some 3%, are left out on every side.

    Args:
        target_port: where the server listens.
        port: to listen on; a free one when omitted.
    """

    def __init__(self, target_port: int, port: int = 0) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.up = self.down = 0
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._over = False

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            ends = list(self._ends)
        _wake(self._listener, *ends)
        for thread in self._threads:
            thread.join(10.0)  # one may wait for a greeting that never comes
        self._listener.close()

    @property
    def total(self) -> int:
        """Bytes so far, both ways."""
        with self._lock:
            return self.up + self.down

    def ends(self, client: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Return the client's socket, to be read and written from now on, and one to the server.

        Raises:
            OSError: the server does not listen, or may not have started yet.
        """
        return client, socket.create_connection(("127.0.0.1", self._target_port))

    def watch(self, upwards: bool) -> Callable[[bytes], None]:
        """Return the callback for each piece of one direction of a connection, called before the piece is passed on."""

        def count(piece: bytes) -> None:
            with self._lock:
                if upwards:
                    self.up += len(piece)
                else:
                    self.down += len(piece)

        return count

    def _start(self, work: Callable[..., None], *words: object) -> None:
        thread = threading.Thread(target=work, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._connect, client)

    def _connect(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            client, server = self.ends(plain)
            with client, server:
                with self._lock:
                    if self._over:
                        return
                    self._ends |= {client, server}
                answers = threading.Thread(
                    target=self._pump, args=(server, client, False), daemon=True
                )
                answers.start()
                self._pump(client, server, True)
                answers.join()
                with self._lock:
                    self._ends -= {client, server}

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        report_progress = self.watch(upwards)
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 18):
                report_progress(piece)
                sink.sendall(piece)
        _wake(source, sink)


def _wake(*ends: socket.socket) -> None:
    """End connections, which wakes who waits for them."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
