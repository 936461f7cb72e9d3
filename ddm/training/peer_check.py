"""The users at the other end of this process's connections; on one machine, the kernel knows them.

Processes that train together talk without proof of who they are, and whoever of a machine's users is quick can connect
in a neighbour's place, to read weights or to change them.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENING = "0A"  # as the kernel writes it


def strangers() -> bool:
    """Whether a TCP connection of this process is with anybody but a process of its own user on this machine.

    An end that the kernel does not list counts as a stranger, and so does one whose process has yet to accept the
    connection. Only Linux tells; elsewhere nobody is one.
    """
    if sys.platform != "linux":
        return False
    # Without IPv6 there is no second table; without the first, reading it fails.
    tables = [Path(table) for table in _TABLES if table == _TABLES[0] or Path(table).exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    # Each connection within the machine has two rows, one for each end, with local and remote address exchanged.
    user = {(row[1], row[2]): int(row[7]) for row in rows}
    own = _sockets()
    mine = [(row[1], row[2]) for row in rows if row[9] in own and row[3] != _LISTENING]
    return any(user.get((remote, local)) != os.getuid() for local, remote in mine)


def _sockets() -> set[str]:
    """The inodes of this process's sockets."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            links.append(str(descriptor.readlink()))
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
