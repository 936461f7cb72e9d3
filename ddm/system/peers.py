"""The kernel's word on who is at the other end of a TCP connection within this machine; Linux only.

A connection within a machine has two rows in the kernel's table, one for each end, with local and remote address
exchanged. A row names its user only while a process holds the socket: one that was closed already stands there as
root's, whoever had it, so such a row names nobody.
"""

import ipaddress
import struct
from dataclasses import dataclass
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENING = "0A"  # as the kernel writes it
_NO_INODE = "0"


@dataclass(frozen=True)
class TcpSocket:
    """One row of the kernel's table.

    Attributes:
        local: its own address, as the kernel writes it.
        remote: the other end's.
        listening: whether it waits for connections.
        inode: which socket it is, among those of all processes.
        user: who holds it, None where no process does any more.
    """

    local: str
    remote: str
    listening: bool
    inode: str
    user: int | None


def tcp_sockets(ends: str = "") -> list[TcpSocket]:
    """List the TCP sockets of this machine, or of this process's network namespace.

    Args:
        ends: only those with this local and remote address, as the kernel writes them. Others are not parsed: who
            opens thousands of connections would make each look at the table slow.

    Raises:
        OSError: there is no such table.
    """
    # Without IPv6 there is no second table; without the first, reading it fails.
    tables = [Path(table) for table in _TABLES if table == _TABLES[0] or Path(table).exists()]
    rows = [
        line.split()
        for table in tables
        for line in table.read_text().splitlines()[1:]
        if ends in line
    ]
    return [
        TcpSocket(
            row[1],
            row[2],
            row[3] == _LISTENING,
            row[9],
            None if row[9] == _NO_INODE else int(row[7]),
        )
        for row in rows
    ]


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user whose process holds a connection's other end; None where the kernel of this machine cannot tell.

    Args:
        client: address and port of the other end.
        server: address and port of this end.
    """
    try:
        ends = (_written(*client), _written(*server))
        users = {
            socket.user
            for socket in tcp_sockets(" ".join(ends))
            if (socket.local, socket.remote) == ends
        }
    except (OSError, ValueError):
        return None
    return users.pop() if len(users) == 1 else None


def _written(host: str, port: int) -> str:
    """Return an address as the kernel writes it: words of 32 bits in the machine's own order, and the port."""
    packed = ipaddress.ip_address(host).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
