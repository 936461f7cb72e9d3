"""A wire tap between silos and aggregator: it ends TLS with the federation's own key, and writes down what passes."""

import socket
import ssl
import threading
from contextlib import ExitStack, suppress
from pathlib import Path


class Tap:
    """Listens where silos connect, and passes everything on to where the aggregator listens.

    Args:
        port: that silos were told.
        target: that the aggregator listens on.
        tls: the federation's `tls/`.
    """

    def __init__(self, port: int, target: int, tls: Path) -> None:
        self.streams: list[bytearray] = []
        """What passed in each direction of each connection, without TLS."""
        self._target = target
        self._inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inside.load_cert_chain(tls / "server.pem", tls / "server.key")
        self._outside = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *error: object) -> None:
        for each in list(self._open):  # wakes whoever waits for it
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10.0)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._connect, args=(plain,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _connect(self, plain: socket.socket) -> None:
        with suppress(OSError), ExitStack() as stack:  # ssl's errors are among these
            silo = stack.enter_context(self._inside.wrap_socket(plain, server_side=True))
            beyond = socket.create_connection(("127.0.0.1", self._target))  # none listens there yet, perhaps
            aggregator = stack.enter_context(self._outside.wrap_socket(beyond, server_hostname="127.0.0.1"))
            self._open += [silo, aggregator]
            back = threading.Thread(target=self._pass, args=(aggregator, silo), daemon=True)
            back.start()
            self._pass(silo, aggregator)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        stream = bytearray()
        self.streams.append(stream)
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                stream += piece
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
