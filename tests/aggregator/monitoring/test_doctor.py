"""The doctor: nothing about a healthy federation, and each thing that goes wrong by its name, made for real."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aggregator.config import Federation
from aggregator.intake.limits import submission_bytes
from aggregator.keys.tls import make_tls
from aggregator.monitoring.doctor import examine
from aggregator.monitoring.probes import FederationFactsReader
from ddm.io.locks import locked
from ddm.protocol.base import now_utc, sha256_file
from ddm.system.findings import Findings
from ddm.system.processes import program
from silo.config import Site
from silo.setup import SiteSetup, init_site, make_card, read_invitation
from tests.conftest import PublishedRelease
from tests.support.federation import POLICY, write_policy
from tests.support.federation_midway import on_free_port

DAY = timedelta(days=1)


@pytest.fixture
def fed(published: PublishedRelease) -> Federation:
    return on_free_port(published.tiny.federation)


def found_in(
    federation: Federation, now: datetime | None = None, against: str | None = None
) -> Findings:
    """What the doctor finds, without the checks that find nothing."""
    findings_by_check = examine(FederationFactsReader(federation, now or now_utc()).facts(against))
    return {check: findings for check, findings in findings_by_check.items() if findings}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_healthy_federation_has_nothing_and_the_command_says_so(fed: Federation) -> None:
    command = [str(program("aggregator")), "doctor", str(fed.path), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    findings = json.loads(process.stdout)
    assert len(findings) == 16 and not any(findings.values())


def test_command_ends_with_3_and_says_what_to_do_when_something_is_wrong(fed: Federation) -> None:
    (fed.keys / "online.key").chmod(0o644)
    command = [str(program("aggregator")), "doctor", str(fed.path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 3
    assert (
        "expected: readable by its owner alone" in process.stdout
        and "found:    mode 644" in process.stdout
    )
    assert "to do:" in process.stdout and "16 checks, 1 found." in process.stdout


def replace_server_certificate(fed: Federation) -> None:
    shutil.rmtree(fed.path / "tls")
    make_tls(fed.path / "tls", ["elsewhere.example"], passphrase=b"correct horse")


def certificate_for_another_host(fed: Federation) -> None:
    edit(fed.path / "invitation.json", '"address":"127.0.0.1:', '"address":"fed.example.org:')


def flip_a_byte_of_signed_metadata(fed: Federation) -> None:
    edit(fed.tuf / "plans.json", '"version":2', '"version":3')


def root_in_the_place_of_the_next(fed: Federation) -> None:
    shutil.copyfile(fed.releases / "1" / "metadata" / "1.root.json", fed.tuf / "2.root.json")


def another_root(fed: Federation) -> None:
    digest = json.loads((fed.path / "invitation.json").read_text())["root_digest"]
    edit(fed.path / "invitation.json", digest, "0" * 64)


def damaged_database(fed: Federation) -> None:
    (fed.path / "flower").mkdir(exist_ok=True)
    (fed.path / "flower" / "superlink.db").write_bytes(
        b"SQLite format 3\0" + bytes(range(256)) * 64
    )


def another_plan_digest(fed: Federation) -> None:
    edit(fed.path / "plans" / "current.json", '"plan_digest":"', '"plan_digest":"0')


def lost_card(fed: Federation) -> None:
    (fed.registry / "north.json").unlink()


def card_with_another_key(fed: Federation) -> None:
    site = Site(fed.path.parent / "impostor")
    path = fed.path / "invitation.json"
    invitation = read_invitation(path, sha256_file(path))
    key = init_site(site, SiteSetup("north", fed.path.parent / "north.npz"), invitation, b"x")
    write_policy(site, POLICY)
    (fed.registry / "north.json").write_bytes(make_card(site, key))


def lost_ledger(fed: Federation) -> None:
    (fed.registry / "ledgers" / "north.json").unlink()


def damaged_ledger(fed: Federation) -> None:
    (fed.registry / "ledgers" / "north.json").write_text("{")


def half_made_release(fed: Federation) -> None:
    (fed.releases / "2.part").mkdir()


def missing_passphrase_file(fed: Federation) -> None:
    with (fed.path / "federation.toml").open("a") as settings:
        settings.write('passphrase_file = "/nowhere/secret"\n')


@pytest.mark.parametrize(
    ("fault", "check", "word"),
    [
        (lambda fed: (fed.keys / "root.key").chmod(0o640), "permissions", "root.key"),
        (lambda fed: fed.keys.chmod(0o755), "permissions", "keys"),
        (lambda fed: (fed.path / "tls" / "server.key").chmod(0o604), "permissions", "server.key"),
        (missing_passphrase_file, "permissions", "passphrase_file"),
        (
            lambda fed: edit(fed.path / "federation.toml", "name = ", "nom = "),
            "configuration",
            "federation.toml",
        ),
        (another_plan_digest, "configuration", "current.json"),
        (replace_server_certificate, "certificate", "authority"),
        (certificate_for_another_host, "certificate", "fed.example.org"),
        (
            lambda fed: (fed.path / "tls" / "server.pem").write_text("none"),
            "certificate",
            "server certificate",
        ),
        (flip_a_byte_of_signed_metadata, "metadata", "plans.json"),
        (root_in_the_place_of_the_next, "metadata", "2.root.json"),
        (lambda fed: (fed.tuf / "timestamp.json").unlink(), "metadata", "timestamp.json"),
        (another_root, "root", "000000"),
        (damaged_database, "database", "superlink.db"),
        (lost_card, "silos", "north"),
        (card_with_another_key, "silos", "a card with another key"),
        (lost_ledger, "ledgers", "north"),
        (damaged_ledger, "ledgers", "north"),
        (half_made_release, "leftovers", "2.part"),
    ],
)
def test_fault_is_found_under_its_name(
    fed: Federation, fault: Callable[[Federation], object], check: str, word: str
) -> None:
    fault(fed)
    findings_by_check = found_in(fed)
    assert check in findings_by_check, findings_by_check
    assert any(
        word in f"{finding.subject} {finding.expected} {finding.got}"
        for finding in findings_by_check[check]
    )
    assert all(finding.remedy for findings in findings_by_check.values() for finding in findings)


def test_taken_port_is_found(fed: Federation) -> None:
    with socket.create_server(("127.0.0.1", fed.settings().port)):
        assert set(found_in(fed)) == {"port"}


def test_running_aggregator_that_does_not_answer_at_its_port_is_found(fed: Federation) -> None:
    (fed.path / "flower").mkdir(exist_ok=True)
    with locked(fed.path / "flower", "runtime"):
        assert set(found_in(fed)) == {"port"}


def test_metadata_and_certificate_are_found_before_they_expire(fed: Federation) -> None:
    soon = found_in(fed, now_utc() + 80 * DAY)
    assert [one.subject for one in soon["metadata"]] == ["tuf/metadata/timestamp.json"]
    assert "9 days left" in soon["metadata"][0].got or "10 days left" in soon["metadata"][0].got
    assert "certificate" not in soon
    assert "certificate" in found_in(fed, now_utc() + 3640 * DAY)


def test_clock_that_is_two_days_behind_shows_by_what_was_signed(fed: Federation) -> None:
    findings = found_in(fed, now_utc() - 2 * DAY)
    assert (
        set(findings) == {"clock"}
        and "47 h" in findings["clock"][0].got
        or "48 h" in findings["clock"][0].got
    )


class DateHandler(BaseHTTPRequestHandler):
    """A web server of which only the date is looked at."""

    offset = timedelta(0)

    def do_HEAD(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", format_datetime(datetime.now(UTC) + self.offset, usegmt=True))
        self.end_headers()


@pytest.fixture
def clock() -> Iterator[str]:
    # In threads: whoever else on this machine finds this port and says nothing must not keep the test waiting.
    with ThreadingHTTPServer(("127.0.0.1", 0), DateHandler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("offset", [-2 * DAY, 2 * DAY])
def test_clock_that_is_two_days_off_shows_against_another_machine(
    fed: Federation, clock: str, monkeypatch: pytest.MonkeyPatch, offset: timedelta
) -> None:
    assert not found_in(fed, against=clock)
    monkeypatch.setattr(DateHandler, "offset", offset)
    (finding,) = found_in(fed, against=clock)["clock"]
    assert "the other machine" in finding.expected


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "nonsense", "http://127.0.0.1:1"])
def test_machine_that_does_not_tell_the_time_is_itself_a_finding(fed: Federation, url: str) -> None:
    assert set(found_in(fed, against=url)) == {"clock"}


def test_old_nginx_is_found_and_a_missing_one_only_where_others_reach_the_address(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "bin" / "nginx"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'nginx version: nginx/1.10.3' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    assert [one.got for one in found_in(fed)["nginx"]] == ["1.10.3"]
    facts = replace(FederationFactsReader(fed, now_utc()).facts(), nginx=None)
    assert not examine(facts)["nginx"]
    public = facts.settings.model_copy(update={"host": "fed.example.org"})
    assert examine(replace(facts, settings=public))["nginx"]


def test_flower_of_another_version_is_found(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flwr-1.99.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.99.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    (finding,) = found_in(fed)["packages"]
    assert (finding.subject, finding.got) == ("flwr", "1.99.0") and ">=1.41" in finding.expected


def test_too_little_disk_or_memory_for_what_the_plan_expects_is_found(
    published: PublishedRelease,
) -> None:
    fed = on_free_port(published.tiny.federation)
    facts = FederationFactsReader(fed, now_utc()).facts()
    assert facts.disk_needed_bytes == 0
    plan, _ = fed.current_plan()
    shutil.rmtree(fed.accepted / plan.plan_id / "north")
    facts = FederationFactsReader(fed, now_utc()).facts()
    assert facts.disk_needed_bytes == 2 * submission_bytes(plan)
    assert facts.memory_free_bytes and facts.memory_free_bytes < 1 << 45
    assert not examine(facts)["disk"] and not examine(facts)["memory"]
    poor = replace(facts, disk_free_bytes=facts.disk_needed_bytes - 1, memory_free_bytes=1)
    assert examine(poor)["disk"] and examine(poor)["memory"]


def test_program_that_outlived_its_run_is_found_and_one_with_its_number_is_not(
    fed: Federation,
) -> None:
    (fed.path / "flower").mkdir(exist_ok=True)
    idle = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with ExitStack() as stack:
        ours = stack.enter_context(
            subprocess.Popen([*idle, f"{fed.path}/flower/x.db"], stdin=subprocess.PIPE)
        )
        other = stack.enter_context(subprocess.Popen(idle, stdin=subprocess.PIPE))
        for process in (ours, other):
            stack.callback(process.send_signal, signal.SIGKILL)
        process_ids = {"pid": os.getpid(), "superlink_pid": ours.pid, "superexec_pid": other.pid}
        (fed.path / "flower" / "info.json").write_text(json.dumps(process_ids))
        assert [one.subject for one in found_in(fed)["processes"]] == ["superlink"]


def test_lock_that_outlives_aggregator_run_is_found(fed: Federation) -> None:
    (fed.path / "flower").mkdir(exist_ok=True)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    (fed.path / "flower" / "info.json").write_text(json.dumps({"pid": dead.pid}))
    with locked(fed.path / "flower", "runtime"):
        (finding,) = found_in(fed)["processes"]
    assert "holds flower/.runtime.lock" in finding.remedy


def test_host_that_does_not_resolve_is_one_finding_beside_all_other_checks(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unresolved(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    findings = found_in(fed)
    assert set(findings) == {"port"}
    assert "DNS" in findings["port"][0].remedy
