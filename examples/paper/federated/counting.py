"""Counts the bytes through a port, with a relay that does not interpret them."""

import contextlib
import socket
import threading
from collections.abc import Callable


class Relay:
    """Listens on a port of loopback and passes every connection on to another one, counting both ways.

    Counts what TCP carries, TLS and HTTP included; the headers of TCP and IP, some 3%, are left out on every side.

    Args:
        target_port: where the server listens.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.up = self.down = 0
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._over = False

    def __enter__(self) -> "Relay":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            ends = list(self._ends)
        for end in (self._listener, *ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        for thread in self._threads:
            thread.join()
        self._listener.close()

    @property
    def total(self) -> int:
        """Bytes so far, both ways."""
        with self._lock:
            return self.up + self.down

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

    def _connect(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:  # the server may not have started yet
            server = socket.create_connection(("127.0.0.1", self._target_port))
            with server:
                with self._lock:
                    if self._over:
                        return
                    self._ends |= {client, server}
                answers = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
                answers.start()
                self._pump(client, server, True)
                answers.join()
                with self._lock:
                    self._ends -= {client, server}

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        try:
            while data := source.recv(1 << 18):
                with self._lock:
                    if upwards:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
