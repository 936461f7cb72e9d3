"""Connections to a page of this machine: nobody holds so many of them, or so long, that its own user is kept out."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from starlette.responses import PlainTextResponse, Response

from ddm.pages.serving import (
    ConnectionLimits,
    PlacesForPeers,
    listening,
    run_server,
    server_of,
)
from tests.support.waiting import LIMIT_S, wait_until

HOST = "127.0.0.1"
STRANGER = 54321
# Holds as many half-open connections as it can, and opens those that end again.
HOLD = """
import os, select, socket, sys
host, port, user, num = sys.argv[1], *map(int, sys.argv[2:])
os.setgroups([])
os.setuid(user)
held = []
while True:
    while len(held) < num:
        made = socket.socket()
        try:
            made.connect((host, port))
            made.send(b"GET / HTTP/1.1\\r\\nHost: ")
            held.append(made)
        except OSError:
            made.close()
    print("held", flush=True)
    readable, _, _ = select.select(held, [], [])
    for ended in readable:
        held.remove(ended)
        ended.close()
"""


@contextmanager
def served() -> Iterator[int]:
    """Serve a page; yield its port."""
    server = server_of(PlainTextResponse("here"), ConnectionLimits(connection_s=3600.0))
    with listening(HOST, 0) as (listener, _):
        thread = threading.Thread(target=run_server, args=(server, listener))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def status(port: int) -> int:
    connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


@contextmanager
def stranger_holds(port: int, num: int = 34) -> Iterator[None]:
    """Let another user of this machine hold connections."""
    words = [sys.executable, "-c", HOLD, HOST, str(port), str(STRANGER), str(num)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells whose a connection is"
)


@needs_linux
@needs_root
def test_half_open_connections_of_another_user_keep_nobody_from_the_page() -> None:
    with served() as port, stranger_holds(port):
        assert {status(port) for _ in range(20)} == {200}


def test_connection_without_a_request_ends_although_a_slow_answer_might_take_longer() -> None:
    with served() as port, socket.create_connection((HOST, port), timeout=LIMIT_S) as idle:
        idle.send(b"GET / HTTP/1.1\r\nHost: ")
        # Where nothing ends the connection, this raises a timeout.
        with suppress(ConnectionResetError):
            assert idle.recv(1) == b""
        assert status(port) == 200


def test_places_of_one_peer_and_of_all_are_bounded_and_come_back() -> None:
    places = PlacesForPeers()
    assert [places.take("a") for _ in range(9)] == [True] * 8 + [False]
    assert [places.take("b") for _ in range(8)] == [True] * 8
    assert not places.take("c")
    places.free("a")
    assert places.take("c")
    assert not places.take("a")


def test_client_that_takes_nothing_of_its_answer_is_cut_off_and_a_slow_one_gets_all_of_it() -> None:
    content = b"x" * (64 << 20)
    limits = ConnectionLimits(connection_s=3600.0, stall_s=0.5)
    server = server_of(Response(content), limits)
    with listening(HOST, 0) as (listener, _):
        thread = threading.Thread(target=run_server, args=(server, listener))
        thread.start()
        try:
            port = listener.getsockname()[1]
            with socket.create_connection((HOST, port), timeout=LIMIT_S) as idle:
                idle.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                wait_until(lambda: server.server_state.total_requests == 1, "the answer")
                wait_until(lambda: not server.server_state.connections, "the end of the connection")
            with socket.create_connection((HOST, port), timeout=LIMIT_S) as slow:
                slow.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                num_bytes = 0
                # Several times as long as the idle one was given.
                while piece := slow.recv(1 << 20):
                    num_bytes += len(piece)
                    time.sleep(0.03)
                assert num_bytes > len(content)
        finally:
            server.should_exit = True
            thread.join()


@needs_linux
@needs_root
def test_places_of_another_user_are_free_again_once_it_is_gone() -> None:
    with served() as port:
        for _ in range(3):
            with stranger_holds(port, 8):
                assert status(port) == 200
        words = [sys.executable, "-c", REQUEST, HOST, str(port), str(STRANGER)]

        def is_answered() -> bool:
            finished = subprocess.run(words, capture_output=True, text=True, check=False)
            return finished.stdout == "200\n"

        wait_until(is_answered, "another user is answered as well, for example through a tunnel")


REQUEST = """
import http.client, os, sys
"loaded while it can be".encode("idna")
os.setgroups([])
os.setuid(int(sys.argv[3]))
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
connection.request("GET", "/")
print(connection.getresponse().status)
"""
