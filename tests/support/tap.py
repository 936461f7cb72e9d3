"""A wire tap between silos and aggregator: it ends TLS with the federation's own key, and writes down what passes."""

import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from examples.paper.federated.counting import Relay


class Tap(Relay):
    """Listens where silos connect, and passes everything on to where the aggregator listens.

    Args:
        port: that silos were told.
        target: that the aggregator listens on.
        tls: the federation's `tls/`.
    """

    def __init__(self, port: int, target: int, tls: Path) -> None:
        super().__init__(target, port)
        self.streams: list[bytearray] = []
        """What passed in each direction of each connection, without TLS."""
        self._inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inside.load_cert_chain(tls / "server.pem", tls / "server.key")
        self._outside = ssl.create_default_context(cafile=str(tls / "ca.pem"))

    def ends(self, client: socket.socket) -> tuple[socket.socket, socket.socket]:
        # Whatever was opened is closed again where the next step fails, so that no port stays taken.
        with ExitStack() as opened:
            silo = opened.enter_context(self._inside.wrap_socket(client, server_side=True))
            beyond = opened.enter_context(super().ends(silo)[1])
            aggregator = self._outside.wrap_socket(beyond, server_hostname="127.0.0.1")
            opened.pop_all()
        return silo, aggregator

    def watch(self, upwards: bool) -> Callable[[bytes], None]:
        stream = bytearray()
        self.streams.append(stream)
        return stream.extend
