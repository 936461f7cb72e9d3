"""Whatever Flower's command does, the aggregator gets an answer or an error of its own, soon, and nothing stays."""

import json
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aggregator.runtime import flower_commands
from aggregator.runtime.flower_commands import FlowerCommands
from ddm.errors import TransportError
from tests.support.errors import has_subject
from tests.support.waiting import LIMIT_S

MakeCommands = Callable[..., FlowerCommands]


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCommands:
    """Make a command of one's own, as a shell script, to stand in the place of Flower's."""
    path = tmp_path / "flwr"
    monkeypatch.setattr(flower_commands, "program", lambda name: path)

    def make(script: str, **settings: float) -> FlowerCommands:
        path.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{script}\n")
        path.chmod(0o755)
        return FlowerCommands(
            tmp_path / "flower",
            dict(os.environ),
            address="127.0.0.1:1",
            ca_path=tmp_path / "ca",
            **settings,
        )

    return make


def alive(tmp_path: Path) -> list[str]:
    """What stays of the groups of processes that the commands began; one that was killed may take a moment to die."""
    begun = set((tmp_path / "pids").read_text().split())
    running = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if group in begun and state != "Z":
                handle = os.pidfd_open(int(path.parent.name))
                ended, _, _ = select.select([handle], [], [], LIMIT_S)
                os.close(handle)
                running += [] if ended else [path.parent.name]
    return running


def test_answer_of_the_command_is_read_whatever_else_it_says(flwr: MakeCommands) -> None:
    assert flwr('echo a warning; printf "\\377\\n"; echo \'{"run-id": 17}\'').submit("plan") == "17"
    assert flwr('echo \'{"runs": [{"status": "running"}]}\'').run_status("17") == "running"


@pytest.mark.parametrize(
    ("script", "got"),
    [
        ("exec sleep 600", "still at work"),
        ("sleep 600 & exit 0", "still at work"),
        ("exec yes '{'", " bytes"),
        ("""yes '{"a":' | head -n 100000 | tr -d '\\n'""", '"a":'),
        ("kill -9 $$", "no answer"),
        ("echo Traceback; exit 1", "Traceback"),
        ('echo \'{"success": false, "error-message": "no such run"}\'', "no such run"),
        ("echo '[17]'", "[17]"),
    ],
    ids=[
        "hangs",
        "leaves a child",
        "writes for ever",
        "nests for ever",
        "killed",
        "crashes",
        "refuses",
        "a list",
    ],
)
def test_fault_of_the_command_is_an_error_with_a_remedy_in_time_and_leaves_no_process(
    flwr: MakeCommands, tmp_path: Path, script: str, got: str
) -> None:
    settings = {}
    if got == "still at work":  # those that answer have all the time that a loaded machine takes
        settings["timeout_s"] = 2.0
    commands = flwr(script, **settings)
    began = time.monotonic()
    with pytest.raises(TransportError) as failed:
        commands.submit("plan")
    assert got in str(failed.value.got)
    assert len(str(failed.value.got)) <= 300
    assert "Nothing is lost" in failed.value.remedy
    assert time.monotonic() - began < LIMIT_S
    assert not alive(tmp_path)


def test_status_of_a_run_is_text_whatever_the_command_answers(flwr: MakeCommands) -> None:
    for said in ["[]", "[17]", "{}", "null", '{"runs": 17}', '{"runs": [17]}', '{"runs": []}']:
        assert flwr(f"echo '{said}'").run_status("17") == said, said


def test_command_that_cannot_be_started_is_an_error_of_ours(
    flwr: MakeCommands, tmp_path: Path
) -> None:
    commands = flwr("true")
    (tmp_path / "flwr").chmod(0o644)
    with pytest.raises(TransportError, check=has_subject("flwr")):
        commands.submit("plan")


def test_many_nodes_are_registered_a_few_at_a_time_and_none_twice(
    flwr: MakeCommands, tmp_path: Path
) -> None:
    counting = f"mkdir {tmp_path}/at-work.$$; ls -d {tmp_path}/at-work.* | wc -l >> {tmp_path}/most; sleep 0.1"
    commands = flwr(f"{counting}; rmdir {tmp_path}/at-work.$$; echo '{{\"success\": true}}'")
    nodes = {f"silo{number}": f"ecdsa-sha2-nistp256 key{number}" for number in range(9)}
    (tmp_path / "flower" / "superlink.db").touch()
    commands.register(nodes)
    at_work = [int(line) for line in (tmp_path / "most").read_text().split()]
    assert len(at_work) == 9
    assert 1 < max(at_work) <= 4
    assert json.loads((tmp_path / "flower" / "registered.json").read_text()) == sorted(
        nodes.values()
    )
    commands.register(nodes | {"another": "ecdsa-sha2-nistp256 another"})
    assert len((tmp_path / "most").read_text().split()) == 10


def test_node_that_is_not_taken_is_named_and_those_before_it_are_remembered(
    flwr: MakeCommands, tmp_path: Path
) -> None:
    commands = flwr('case "$3" in *bad*) echo no;; *) echo \'{"success": true}\';; esac')
    nodes = {f"silo{number}": f"key{number}" for number in range(4)} | {"bad": "key"}
    with pytest.raises(TransportError, check=has_subject("registering silo bad")):
        commands.register(nodes)
    assert json.loads((tmp_path / "flower" / "registered.json").read_text()) == [
        f"key{number}" for number in range(4)
    ]
