"""Counts the bytes through a port, with a relay that does not interpret them."""

import socket
import threading


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

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def total(self) -> int:
        """Bytes so far, both ways."""
        with self._lock:
            return self.up + self.down

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:  # it has not started yet
                client.close()
                continue
            for source, sink, upwards in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, upwards), daemon=True).start()

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
                end.close()
