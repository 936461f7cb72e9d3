"""Whose the other end of a connection is: real sockets, and a process of another user."""

import os
import socket
import subprocess
import sys

import pytest

from ddm.system.peers import tcp_sockets, user_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
CONNECT = """
import os, socket, sys
"loaded while it can be".encode("idna")
os.setgroups([])
os.setuid(int(sys.argv[3]))
made = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
sys.stdin.readline()
made.close()
print("closed", flush=True)
sys.stdin.readline()
"""
STRANGER = 54321


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_own_connection_is_known_while_both_ends_are_open(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        client = socket.create_connection(listener.getsockname()[:2])
        with listener.accept()[0] as accepted:
            ends = (accepted.getpeername()[:2], accepted.getsockname()[:2])
            assert user_of(*ends) == os.getuid()
            client.close()
            assert user_of(*ends) is None, "closed, it stands in the kernel's table as root's"
        assert user_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
        assert user_of(("no address", 1), ("127.0.0.1", 2)) is None
        assert any(end.listening for end in tcp_sockets())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_connection_of_another_user_is_never_ones_own_however_it_is_closed() -> None:
    """The attack: send, close at once, and pass for root, whose every closed socket seems to be."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", CONNECT, "127.0.0.1", str(port), str(STRANGER)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == "connected\n"
            with listener.accept()[0] as accepted:
                ends = (accepted.getpeername(), accepted.getsockname())
                assert user_of(*ends) == STRANGER
                process.stdin.write("close\n")
                process.stdin.flush()
                assert process.stdout.readline() == "closed\n"
                assert user_of(*ends) is None
                process.stdin.close()
