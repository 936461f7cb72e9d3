"""Who is at the other end of a connection: the kernel's word, on real sockets."""

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from ddm.training.group import has_foreign_peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
OTHER_USER = 12345


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A port of this process."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        made = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with made:
        yield made


def test_connection_is_with_a_stranger_when_its_other_end_is_another_user_s(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_foreign_peers()
    with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0]:
        assert not has_foreign_peers()
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + OTHER_USER)
        assert has_foreign_peers()
