"""Who is at the other end of a connection: what the processes of a training write of theirs, on real sockets."""

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from ddm.errors import TrustError
from ddm.system.peers import own_connections
from ddm.training.group import (
    Member,
    enter_group_environment,
    has_stranger,
    member_of,
    refuse_torchrun,
)
from tests.support.errors import has_subject

ONE = ("0100007F:0001", "0100007F:0002")
OTHER_END = ("0100007F:0002", "0100007F:0001")
WITH_STRANGER = ("0100007F:0001", "0100007F:0003")


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists them")
def test_connections_of_this_process_are_listed_with_both_ends(listener: socket.socket) -> None:
    before = own_connections()
    with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0]:
        opened = own_connections() - before
        assert len(opened) == 2
        assert {(remote, local) for local, remote in opened} == opened
    assert own_connections() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists them")
def test_connection_of_ipv4_is_the_same_from_a_socket_of_ipv6() -> None:
    before = own_connections()
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            opened = own_connections() - before
            assert {(remote, local) for local, remote in opened} == opened


def test_connection_whose_other_end_no_process_of_the_training_has_is_a_strangers() -> None:
    own = frozenset({ONE})
    other = frozenset({OTHER_END})
    assert not has_stranger(own, [own, other])
    assert not has_stranger(frozenset(), [frozenset(), frozenset()])
    assert has_stranger(own, [own, frozenset()])
    assert has_stranger(frozenset({ONE, WITH_STRANGER}), [frozenset({ONE, WITH_STRANGER}), other])
    # A stranger can be connected with several, and is none of them.
    assert has_stranger(
        frozenset({WITH_STRANGER}), [frozenset({WITH_STRANGER}), frozenset({WITH_STRANGER})]
    )


def test_process_of_torchrun_is_refused() -> None:
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for refuse in (refuse_torchrun, member_of):
        with pytest.raises(TrustError, check=has_subject("torchrun")):
            refuse(of_torchrun)
    refuse_torchrun({"RANK": "0", "WORLD_SIZE": "2"})


def test_address_in_the_environment_leads_to_no_other_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    others = {"MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TORCH_GLOO_LAZY_INIT"}
    for name in others:
        monkeypatch.setenv(name, "1")
    enter_group_environment(Member(rank=1, num=2, local_rank=1, on_one_machine=False))
    assert not others & os.environ.keys()
    assert os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "2"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0", "an operator names the network of several"
    enter_group_environment(Member(rank=1, num=2, local_rank=1, on_one_machine=True))
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
