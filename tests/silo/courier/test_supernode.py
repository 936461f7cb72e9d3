import os
import signal
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from aggregator.server_app import node_identity
from ddm.errors import MissingFileError, SetupError
from ddm.protocol.enrolment import Card
from ddm.system.process_table import descendants
from silo.courier import supernode
from silo.courier.handlers import SiteLimits
from silo.courier.node import make_certificate
from silo.courier.supernode import (
    Courier,
    answers_late,
    last_started,
    latest_problem,
    make_node_key,
)
from tests.support.errors import has_subject
from tests.support.processes import is_running
from tests.support.waiting import wait_until


def test_node_key_fits_its_public_line_and_the_card_when_made(tmp_path):
    line = make_node_key(tmp_path / "node.key")
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert (
        load_ssh_public_key(line.encode()).public_numbers() == private.public_key().public_numbers()
    )
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == 0o600
    Card.__pydantic_validator__.validate_assignment(Card.model_construct(), "node_key", line)
    pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert node_identity(line) == pem


def test_node_key_is_kept_when_made_again(tmp_path):
    make_node_key(tmp_path / "node.key")
    before = (tmp_path / "node.key").read_bytes()
    with pytest.raises(SetupError):
        make_node_key(tmp_path / "node.key")
    assert (tmp_path / "node.key").read_bytes() == before


def test_courier_names_what_is_missing_when_the_site_is_incomplete(tmp_path):
    (tmp_path / "courier").mkdir()
    with pytest.raises(MissingFileError, check=has_subject("node.key")):
        Courier(tmp_path, address="127.0.0.1:1", max_bundle_bytes=1).start()


def test_limits_come_back_when_the_site_path_holds_unusual_characters(tmp_path):
    site = tmp_path / 'a "b" c=d'
    arguments = Courier(site, address="127.0.0.1:1", max_bundle_bytes=7).node_config().split(" ")
    config = dict(argument.split("=", 1) for argument in arguments)
    config["site"] = config["site"].strip('"')
    limits = SiteLimits.from_node_config(config)
    assert limits.site == site and limits.bundle_bytes == 7


RECEIVED = "INFO :      Receiving: query message (ID: 5da3)\nINFO :      Received successfully\n"
STARTED = "INFO :      Start `flwr-clientapp` process\n"
SENT = "INFO :      Sending: query message (ID: 2e73)\nINFO :      Sent successfully\n"
EARLY = RECEIVED.replace("INFO :      Received", STARTED + "INFO :      Received")


def test_supernode_counts_as_late_when_it_sends_an_answer_that_nothing_can_have_made():
    for log, late in [
        ("", False),
        (RECEIVED, False),
        (RECEIVED + STARTED, False),
        (RECEIVED + STARTED + SENT, False),
        (EARLY + SENT, False),
        (SENT, False),
        (RECEIVED + STARTED + SENT + RECEIVED, False),
        (RECEIVED + STARTED + SENT + RECEIVED + SENT, True),
        (RECEIVED + STARTED + SENT + RECEIVED + SENT + STARTED, True),
        (RECEIVED + SENT + STARTED + RECEIVED + SENT + STARTED, True),
        (RECEIVED + SENT + STARTED + EARLY + SENT, False),
    ]:
        assert answers_late(log) is late, (log, late)


QUOTED = "ERROR :     Failed to receive message 5da3: Receiving: query message (ID: 5da3)\n"


def test_line_that_quotes_another_one_is_no_step():
    log = RECEIVED + STARTED + SENT + QUOTED + SENT
    assert not answers_late(log)
    assert last_started(RECEIVED + STARTED + QUOTED)
    assert not last_started(RECEIVED + STARTED + SENT)
    assert not last_started(RECEIVED + QUOTED)
    assert not last_started("")


SUPERNODE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("INFO :      SuperNode ID: 42", flush=True)
time.sleep(600)
"""


@pytest.fixture
def courier(tmp_path, monkeypatch):
    """A courier whose SuperNode is a program that stays, with a helper beside it."""

    def make():
        monkeypatch.setattr(
            supernode, "script_command", lambda name: [sys.executable, "-c", SUPERNODE]
        )
        for name in ("courier", "courier/flwr"):
            (tmp_path / name).mkdir(exist_ok=True)
        for name in ("node.key", "ca.pem"):
            (tmp_path / "courier" / name).touch()
        return Courier(tmp_path, address="127.0.0.1:1", max_bundle_bytes=1)

    return make


ANSWERING = SUPERNODE.replace(
    "import time; time.sleep(600)", "import os, time; os.fork(); time.sleep(600)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")
def test_courier_is_answering_while_its_helper_has_a_process(courier, monkeypatch):
    with courier() as idle:
        descendants_of(idle)
        assert not idle.is_answering
    monkeypatch.setattr(sys.modules[__name__], "SUPERNODE", ANSWERING)
    with courier() as busy:
        check_until(busy, lambda: busy.is_answering)


def descendants_of(courier):
    """Wait for the helper; return its process id."""
    check_until(courier, lambda: descendants(courier.info()["supernode_pid"]))
    return descendants(courier.info()["supernode_pid"])


def check_until(courier, condition):
    wait_until(condition, check=courier.check)


@pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are read from /proc")
def test_supernode_and_its_programs_have_a_limit_of_memory(tmp_path):
    """The attack: a small message that names one chunk of bytes many times."""
    (tmp_path / "courier").mkdir()
    make_node_key(tmp_path / "courier" / "node.key")
    certificate, _ = make_certificate("127.0.0.1")
    (tmp_path / "courier" / "ca.pem").write_bytes(certificate)
    with Courier(tmp_path, address="127.0.0.1:1", max_bundle_bytes=1) as kept:
        for pid in (*descendants_of(kept), kept.info()["supernode_pid"]):
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
            (line,) = [line for line in limits if line.startswith("Max data size")]
            assert line.split()[3:5] == [str(2 * 1024**3)] * 2


def test_supernode_that_was_killed_is_signed_off_and_started_again(courier, tmp_path, monkeypatch):
    signed_off = []
    node_id = tmp_path / "courier" / "flwr" / "node_id"
    monkeypatch.setattr(Courier, "_sign_off", lambda self: signed_off.append(node_id.exists()))
    with courier() as kept:
        first = kept.info()
        check_until(kept, node_id.exists)
        assert node_id.read_text() == "42" and kept.problem is None
        os.kill(first["supernode_pid"], signal.SIGKILL)
        check_until(kept, lambda: kept.info()["num_restarts"] == 1)
        second = kept.info()
        assert second["supernode_pid"] != first["supernode_pid"] and signed_off == [False, True]
    assert (
        not is_running(first["guard_pid"])
        and not is_running(second["supernode_pid"])
        and not is_running(second["guard_pid"])
    )
    kept.check()
    assert kept.info()["supernode_pid"] is None, "one that was stopped is not started again"


@pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")
def test_supernode_is_replaced_when_it_waits_for_a_helper_that_died(courier, monkeypatch):
    monkeypatch.setattr(supernode, "_CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(Courier, "_sign_off", lambda self: None)
    with courier() as kept:
        (pid,) = process_ids = descendants_of(kept)
        monkeypatch.setattr(supernode, "_SETTLED_S", 0.0)
        over = time.monotonic() + 2.0
        check_until(kept, lambda: time.monotonic() > over)
        assert kept.info()["num_restarts"] == 0 and descendants_of(kept) == process_ids
        os.kill(pid, signal.SIGKILL)
        check_until(kept, lambda: kept.info()["num_restarts"])


@pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")
def test_supernode_is_replaced_when_the_program_that_answers_ends_without_an_answer(
    courier, monkeypatch
):
    """The attack: a message that cannot be put together, for whose answer Flower waits for ever."""
    monkeypatch.setattr(supernode, "_CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(supernode, "_SETTLED_S", 0.0)
    monkeypatch.setattr(supernode, "_VAIN_S", 1.0)
    monkeypatch.setattr(Courier, "_sign_off", lambda self: None)
    vain = SUPERNODE.replace("SuperNode ID: 42", "Start `flwr-clientapp` process")
    monkeypatch.setattr(sys.modules[__name__], "SUPERNODE", vain)
    with courier() as kept:
        check_until(kept, lambda: kept.info()["num_restarts"])


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("Failed to initialize the connection to the SuperLink.\n401 Unauthorized\n", "refused"),
        (
            "Failed to initialize the connection to the SuperLink.\n[code: 1] Failed to activate SuperNode.\n",
            "enrolled",
        ),
        ("Connection attempt failed, retrying\nConnection successful\n", None),
    ],
)
def test_problem_is_the_last_one_that_the_log_shows(log, says):
    problem = latest_problem(log)
    assert (says in problem) if says else problem is None
