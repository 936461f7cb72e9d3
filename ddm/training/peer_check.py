"""The users at the other end of this process's connections; on one machine, the kernel knows them.

Processes that train together talk without proof of who they are, and whoever of a machine's users is quick can connect
in a neighbour's place, to read weights or to change them.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from ddm.system.peers import tcp_sockets


def has_foreign_peers() -> bool:
    """Whether a TCP connection of this process is with anybody but a process of its own user on this machine.

    An end that the kernel does not list counts as a stranger, and so does one whose process has yet to accept the
    connection, or has closed it. Only Linux tells; elsewhere nobody is one.
    """
    if sys.platform != "linux":
        return False
    sockets = tcp_sockets()
    user = {(socket.local, socket.remote): socket.user for socket in sockets}
    own = _sockets()
    mine = [
        (socket.local, socket.remote)
        for socket in sockets
        if socket.inode in own and not socket.listening
    ]
    return any(user.get((remote, local)) != os.getuid() for local, remote in mine)


def _sockets() -> set[str]:
    """The inodes of this process's sockets."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            links.append(str(descriptor.readlink()))
    return {
        link.removeprefix("socket:[").removesuffix("]")
        for link in links
        if link.startswith("socket:[")
    }
