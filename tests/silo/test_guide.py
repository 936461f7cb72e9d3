"""`silo run` at a terminal: it says what it needs, waits for it, and goes on; elsewhere it ends as a service does."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ddm.errors import AuditError
from ddm.system.processes import program
from silo.config import Site
from silo.worker.state import load_state, reported_code, state_path
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, POLICY, PlannedFederation, write_policy
from tests.support.processes import is_running, running_children
from tests.support.terminal import at_terminal
from tests.support.waiting import wait_until

SILO = "north"
UNWAIVED: dict[str, Any] = POLICY | {"audit": {"holdout_share": 0.25, "min_holdout_units": 10}}


@pytest.fixture
def site(planned_once: PlannedFederation, tmp_path: Path) -> Site:
    return planned_once.tiny.copy(tmp_path / "copy").sites[SILO]


@pytest.fixture
def run_words(site: Site, tmp_path: Path) -> list[str]:
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    words = [str(program("silo")), "run", str(site.path), "--only", "worker"]
    return [*words, "--passphrase-file", str(secret)]


def wait_until_sent(site: Site) -> None:
    wait_until(lambda: load_state(state_path(site.private)).state == "in_outbox", "a submission")


def test_run_at_a_terminal_names_the_missing_waiver_and_goes_on_once_it_is_written(
    site: Site,
    run_words: list[str],
) -> None:
    write_policy(site, UNWAIVED)
    with at_terminal(run_words) as terminal:
        terminal.wait_for(f"type in another terminal: silo waive {site.path}")
        assert reported_code(site) == AuditError.exit_code
        options = ("--role", "a role", "--reason", "a reason", "--until", "2999-01-01")
        assert run_command("silo", "waive", site.path, *options).code == 0
        wait_until_sent(site)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait_for_end() == 130
    assert terminal.shown.count("silo waive") == 1, "it is said once, however long it waits"


def test_run_at_a_terminal_opens_the_review_page_on_enter_and_sends_what_is_approved(
    site: Site,
    run_words: list[str],
) -> None:
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    with at_terminal(run_words) as terminal:
        terminal.wait_for("press Enter to open the review page")
        assert f"type in another terminal: silo review {site.path}" in terminal.shown
        assert "Open in a browser" not in terminal.shown
        terminal.type("\n")
        terminal.wait_for("Open in a browser on this machine: http://127.0.0.1:")
        digest = load_state(state_path(site.private)).submission_digest
        assert run_command("silo", "approve", site.path, "--digest", digest).code == 0
        wait_until_sent(site)
        terminal.process.send_signal(signal.SIGINT)
        # The page is a program at the same terminal: the end of both is the end of what can be read.
        assert terminal.wait_for_end() == 130


def test_review_page_ends_when_the_run_that_opened_it_is_killed(
    site: Site,
    run_words: list[str],
) -> None:
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    # The shell holds the terminal, as a person's does: the system hangs nobody up when the run is killed.
    shell_words = ["bash", "-c", '"$@"; read -r line', "bash", *run_words]
    with at_terminal(shell_words) as terminal:
        terminal.wait_for("press Enter to open the review page")
        terminal.type("\n")
        terminal.wait_for("Open in a browser on this machine: http://127.0.0.1:")
        run_pid = running_children(terminal.process.pid)[0]
        command_lines = {
            pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running_children(run_pid)
        }
        page_pid = next(pid for pid, words in command_lines.items() if b"review" in words)
        os.kill(run_pid, signal.SIGKILL)
        wait_until(lambda: not is_running(page_pid), "the end of the page")


def test_run_at_a_terminal_says_which_plan_waits_for_acceptance_and_takes_it(
    site: Site,
    run_words: list[str],
) -> None:
    write_policy(site, POLICY | {"plans": {"accept": "person"}})
    with at_terminal(run_words) as terminal:
        command = f"type in another terminal: silo accept {site.path} --digest "
        terminal.wait_for(command)
        terminal.wait_for("\n")
        digest = terminal.shown.partition(command)[2][:64]
        assert run_command("silo", "accept", site.path, "--digest", digest).code == 0
        wait_until_sent(site)


@pytest.mark.parametrize("how", ["background", "pipe"])
def test_run_without_a_terminal_in_the_foreground_ends_with_the_code_of_what_it_needs(
    site: Site,
    run_words: list[str],
    how: str,
) -> None:
    write_policy(site, UNWAIVED)
    script = '"$@" < /dev/null | cat; exit "${PIPESTATUS[0]}"'
    if how == "background":
        # With job control, as a person's shell has it, standard input of a background job is still the terminal.
        script = 'set -m; "$@" & wait $!'
    with at_terminal(["bash", "-c", script, "bash", *run_words]) as terminal:
        assert terminal.wait_for_end() == AuditError.exit_code
    assert "in another terminal" not in terminal.shown
