"""Who is at the other end of a TCP connection, as the kernel lists connections and their users; Linux only.

A connection within a machine has two rows in the kernel's table, one for each end, with local and remote address
exchanged. A row names its user only while a process has the socket open: a closed one is listed as root's, regardless
of who had it, so such a row names nobody.
"""

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path("/proc/self/net/tcp")
_TABLE_OF_IPV6 = Path("/proc/self/net/tcp6")
# As the kernel writes them.
_LISTENING = "0A"
_NO_INODE = "0"
# Of a question about one socket; the names are those of the kernel's headers.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
_ANY_NUMBER = 0xFFFFFFFF
_MAX_ANSWER_BYTES = 4096
# An IPv4 address in a socket of IPv6, which the other end may hold in one of IPv4.
_MAPPED_IPV4 = "0000000000000000FFFF0000"

Connection = tuple[str, str]
"""Local and remote address of an open connection, as the kernel writes them; the other end's are exchanged."""


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


def tcp_sockets(end: str = "") -> list[TcpSocket]:
    """List the TCP sockets of this machine, or of this process's network namespace.

    Args:
        end: only those with this local or remote address, as the kernel writes it. Others are not parsed: who opens
            thousands of connections would make each look at the table slow.

    Raises:
        OSError: there is no such table.
    """
    lines = _TABLE.read_text().splitlines()[1:]
    # Without IPv6 there is no second table.
    if _TABLE_OF_IPV6.exists():
        lines += _TABLE_OF_IPV6.read_text().splitlines()[1:]
    return [_parse(line.split()) for line in lines if end in line]


def _parse(row: list[str]) -> TcpSocket:
    inode = row[9]
    return TcpSocket(
        local=row[1],
        remote=row[2],
        listening=row[3] == _LISTENING,
        inode=inode,
        user=None if inode == _NO_INODE else int(row[7]),
    )


def own_connections() -> frozenset[Connection]:
    """Return this process's open TCP connections; none where the system does not list them.

    Raises:
        OSError: there is no such table.
    """
    if sys.platform != "linux":
        return frozenset()
    # The table before the descriptors: a socket that is opened in between is in neither.
    sockets = tcp_sockets()
    inodes = _own_inodes()
    connections = set()
    for row in sockets:
        if row.inode in inodes and not row.listening:
            local = row.local.removeprefix(_MAPPED_IPV4)
            remote = row.remote.removeprefix(_MAPPED_IPV4)
            connections.add((local, remote))
    return frozenset(connections)


def _own_inodes() -> set[str]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # It may have been closed since.
        with suppress(FileNotFoundError):
            link = str(descriptor.readlink())
            if link.startswith("socket:["):
                inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    return inodes


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user whose process holds a connection's other end; None where the kernel of this machine cannot tell.

    Args:
        client: address and port of the other end.
        server: address and port of this end.
    """
    with suppress(ValueError):  # from what is no address
        try:
            return _ask_for_user(client, server)
        except OSError:
            # The kernel knows no such socket, or it answers no questions about single ones.
            return users_at(server).get(written(*client))
    return None


def _ask_for_user(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user of a connection's other end by a question to the kernel about this socket alone.

    To read the kernel's table takes some hundred times as long: the kernel looks for its rows in a hash table whose
    size follows the machine's memory. Source: sock_diag(7).

    Raises:
        ValueError: one of the two is no address.
        OSError: there is no such socket on this machine, or the kernel does not answer such questions.
    """
    hosts = [ipaddress.ip_address(host) for host, _ in (client, server)]
    family = socket.AF_INET if hosts[0].version == 4 else socket.AF_INET6
    ends = struct.pack("!HH", client[1], server[1])
    ends += b"".join(host.packed.ljust(16, b"\0") for host in hosts)
    # In any state, on any network interface, whatever the kernel's own number of the socket.
    question = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ALL_STATES) + ends
    question += struct.pack("=III", 0, _ANY_NUMBER, _ANY_NUMBER)
    header = struct.pack("=IHHII", 16 + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + question)
        answer = kernel.recv(_MAX_ANSWER_BYTES)
    kind = struct.unpack_from("=H", answer, 4)[0]
    if kind != _SOCK_DIAG_BY_FAMILY:
        # The kernel states the number of an error with a minus sign.
        number = -struct.unpack_from("=i", answer, 16)[0]
        raise OSError(number, os.strerror(number))
    user, inode = struct.unpack_from("=II", answer, 80)
    # Where there is no such connection the kernel tells of a socket that listens at the address.
    if answer[20:56] != ends or inode == 0:
        return None
    return int(user)


def users_at(server: tuple[str, int]) -> dict[str, int | None]:
    """Return the user of every connection with a server of this machine, by the client's address as `written` has it.

    One look at the kernel's table for all connections: it takes as long as a look for one.
    """
    server_end = written(*server)
    # The kernel's table is read in pieces. If connections come and go meanwhile, a socket may be listed twice.
    sockets: dict[str, set[TcpSocket]] = {}
    try:
        for row in tcp_sockets(server_end):
            if row.remote == server_end:
                sockets.setdefault(row.local, set()).add(row)
    except (OSError, ValueError):
        return {}
    # Two sockets with one address name nobody.
    return {
        address: found.pop().user if len(found) == 1 else None for address, found in sockets.items()
    }


def written(host: str, port: int) -> str:
    """Return an address as the kernel writes it: words of 32 bits in the machine's own order, and the port."""
    packed = ipaddress.ip_address(host).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
