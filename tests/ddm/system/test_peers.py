"""Whose the other end of a connection is: real sockets, and a process of another user."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.system import peers
from ddm.system.peers import tcp_sockets, user_of, users_at, written

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


@pytest.fixture(params=["question about one socket", "table of all"])
def _one_way_to_ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one of the two ways in which the kernel tells."""

    def answer_nothing(*ends: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    if request.param == "table of all":
        monkeypatch.setattr(peers, "_ask_for_user", answer_nothing)
    else:
        monkeypatch.setattr(peers, "_TABLE", Path("/no/such/table"))


@pytest.mark.usefixtures("_one_way_to_ask")
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
        assert user_of(("127.0.0.1", 1), ("no address", 2)) is None
        listening = listener.getsockname()[:2]
        assert user_of(listening, (host, 1)) is None, "it listens, and has no other end"


def test_sockets_that_listen_are_listed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = written(*listener.getsockname())
        assert [end.local for end in tcp_sockets() if end.listening].count(address) == 1


@pytest.mark.usefixtures("_one_way_to_ask")
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


def test_socket_that_the_kernel_lists_twice_in_one_reading_still_names_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readings of a table that changes meanwhile list single sockets twice, although they are open once."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        server, address = accepted.getsockname(), written(*client.getsockname())
        heading, *rows = Path("/proc/self/net/tcp").read_text().splitlines()
        row = next(row for row in rows if row.split()[1] == address)
        table = tmp_path / "tcp"
        monkeypatch.setattr(peers, "_TABLE", table)
        # The same socket again, with another number of the row and a byte that waits.
        again = row.replace("00000000:00000000", "00000001:00000000", 1)
        table.write_text("\n".join([heading, row, "   9" + again[4:]]) + "\n")
        assert users_at(server) == {address: os.getuid()}
        # Another socket with the same address: a new one, whose user may be another.
        inode = row.split()[9]
        other = row.replace(f" {inode} ", " 1 ", 1)
        table.write_text("\n".join([heading, row, other]) + "\n")
        assert users_at(server) == {address: None}
