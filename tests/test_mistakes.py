"""Mistakes that people make, each one typed: no stack trace, a documented code, and the remedy, once done, helps.

The commands run in this process, as `ddm.system.console.run_app` runs them for the installed programs.
"""

import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ddm.io.locks import locked
from ddm.system.processes import program
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.federation import images
from tests.support.mistakes import (
    MAX_LINES,
    Mistake,
    WaitingFederation,
    back_up,
    copy_file,
    edit_text,
    flip_bit,
    in_turn,
    move_file,
    restore,
    status_command,
    toml_slip,
    type_command,
    type_remedy,
)


@pytest.fixture(scope="module")
def world_once(tmp_path_factory: pytest.TempPathFactory) -> WaitingFederation:
    return WaitingFederation.create(tmp_path_factory.mktemp("mistakes") / "Süd 1")


@pytest.fixture
def world(world_once: WaitingFederation, tmp_path: Path) -> WaitingFederation:
    return world_once.copy(tmp_path / "Süd 1")


MISTAKES = {
    # Typing
    "a command misspelt": Mistake(
        lambda w: ["silo", "stauts", w.north],
        2,
        "Did you mean 'status'",
        repeated_command=status_command,
    ),
    "a flag misspelt": Mistake(
        lambda w: [*status_command(w), "--jsn"],
        2,
        "Did you mean --json",
        repeated_command=lambda w: [*status_command(w), "--json"],
    ),
    "an option left out": Mistake(
        lambda w: w.init()[:-2][:3], 2, "Missing option '--id'", repeated_command=lambda w: w.init()
    ),
    "arguments swapped": Mistake(
        lambda w: ["aggregator", "enroll", "--yes", w.path / "north.card.json", w.fed],
        2,
        "is a file",
        repeated_command=lambda w: [
            "aggregator",
            "enroll",
            "--yes",
            w.fed,
            w.path / "north.card.json",
        ],
    ),
    "a half that does not exist": Mistake(
        lambda w: ["silo", "run", w.north, "--only", "both"],
        2,
        "'worker', 'courier'",
        repeated_command=status_command,
    ),
    # The wrong folder or file
    "the federation for the site": Mistake(
        lambda w: ["silo", "status", w.fed], 4, "silo.toml", repeated_command=status_command
    ),
    "the site for the federation": Mistake(
        lambda w: ["aggregator", "status", w.north],
        4,
        "federation.toml",
        repeated_command=lambda w: ["aggregator", "status", w.fed],
    ),
    "a folder in the site": Mistake(
        lambda w: ["silo", "status", w.north / "private"],
        4,
        "silo.toml",
        repeated_command=status_command,
    ),
    "the card for the invitation": Mistake(
        lambda w: w.init(invitation=w.path / "north.card.json"),
        21,
        "name the right file",
        repeated_command=lambda w: w.init(),
    ),
    "the invitation for the card": Mistake(
        lambda w: ["aggregator", "enroll", "--yes", w.fed, w.fed / "invitation.json"],
        21,
        "name the right file",
        repeated_command=lambda w: [
            "aggregator",
            "enroll",
            "--yes",
            w.fed,
            w.path / "north.card.json",
        ],
    ),
    "an invitation that is not there": Mistake(
        lambda w: w.init(invitation="gone.json"),
        4,
        "gone.json",
        repeated_command=lambda w: w.init(),
    ),
    "a wrong code of the invitation": Mistake(
        lambda w: w.init(**{"code": "0" * 64}),
        19,
        "read out the code of the invitation again",
        repeated_command=lambda w: w.init(**{"code": w.invitation_digest.upper()}),
    ),
    "a site id with a blank": Mistake(
        lambda w: w.init(id="Nord 1"),
        3,
        "a letter a-z",
        repeated_command=lambda w: w.init(id="nord1"),
    ),
    "a path of images with a slip": Mistake(
        lambda w: w.init(data=w.path / "nroth.npz"),
        4,
        "nroth.npz",
        repeated_command=lambda w: w.init(),
    ),
    "a letter for images": Mistake(
        lambda w: w.init(data=w.path / "pass"),
        7,
        "silo scan --data",
        repeated_command=lambda w: [
            "silo",
            "scan",
            "--data",
            w.path / "pass",
            "--private",
            w.path / "scanned",
        ],
        final_code=7,
    ),
    "a site made twice": Mistake(
        lambda w: w.init("north"),
        6,
        "Choose another folder",
        repeated_command=lambda w: w.init("north 2"),
    ),
    "a federation made twice": Mistake(
        lambda w: [
            "aggregator",
            "init",
            w.fed,
            "--name",
            "tiny",
            "--licence",
            "CC-BY-4.0",
            "--address",
            "127.0.0.1:9092",
            *w.secret,
        ],
        6,
        "Choose another folder",
        repeated_command=lambda w: [
            "aggregator",
            "init",
            w.path / "fed 2",
            "--name",
            "tiny",
            "--licence",
            "CC-BY-4.0",
            "--address",
            "127.0.0.1:9092",
            *w.secret,
        ],
    ),
    "an address without a port": Mistake(
        lambda w: [
            "aggregator",
            "init",
            w.path / "f",
            "--name",
            "a",
            "--licence",
            "CC-BY-4.0",
            "--address",
            "localhost",
            *w.secret,
        ],
        3,
        "--address",
        repeated_command=lambda w: [
            "aggregator",
            "init",
            w.path / "f",
            "--name",
            "a",
            "--licence",
            "CC-BY-4.0",
            "--address",
            "localhost:9092",
            *w.secret,
        ],
    ),
    "results into a folder": Mistake(
        lambda w: ["silo", "enroll", w.north, "--out", w.south, *w.secret],
        2,
        "directory",
        repeated_command=lambda w: w.enroll(*w.secret),
    ),
    "results below a file": Mistake(
        lambda w: ["silo", "enroll", w.north, "--out", w.path / "pass" / "c.json", *w.secret],
        8,
        "paths",
        repeated_command=lambda w: w.enroll(*w.secret),
    ),
    # Passphrases and keys
    "a wrong passphrase": Mistake(
        lambda w: w.enroll("--passphrase-file", w.path / "wrong"),
        5,
        "right passphrase",
        repeated_command=lambda w: w.enroll(*w.secret),
    ),
    "an empty passphrase file": Mistake(
        lambda w: w.enroll("--passphrase-file", w.path / "empty"),
        5,
        "first line",
        repeated_command=lambda w: w.enroll(*w.secret),
    ),
    "a passphrase file that is gone": Mistake(
        lambda w: w.enroll("--passphrase-file", w.path / "gone"),
        4,
        "--passphrase-file",
        repeated_command=lambda w: w.enroll(*w.secret),
    ),
    "nobody to ask for the passphrase": Mistake(
        lambda w: w.enroll(), 5, "--passphrase-file", repeated_command=lambda w: w.enroll(*w.secret)
    ),
    "a key that was moved away": Mistake(
        lambda w: w.enroll(*w.secret),
        4,
        "Restore private/silo.key",
        move_file("north/private/silo.key", "usb"),
        copy_file("usb", "north/private/silo.key"),
    ),
    "a key that was written over": Mistake(
        lambda w: w.enroll(*w.secret),
        3,
        "Restore the key's file from backup",
        in_turn(back_up("north/private/silo.key"), copy_file("pass", "north/private/silo.key")),
        restore("north/private/silo.key"),
    ),
    # Configuration
    "a quote that is not closed": toml_slip('silo_id = "north"', 'silo_id = "north', "line 2"),
    "a field misspelt": toml_slip("accumulate = 1", "acumulate = 1", "field training.acumulate"),
    "a decimal comma": toml_slip("poll_s = 0.5", "poll_s = 0,5", "no comma"),
    "a path with backslashes": toml_slip(
        'federation = "tiny"', 'federation = "C:\\Users\\x"', "single quotes"
    ),
    "a number out of range": toml_slip(
        "accumulate = 1", "accumulate = 0", "field training.accumulate"
    ),
    "a file saved as UTF-16": Mistake(
        status_command,
        3,
        "saved as UTF-8",
        in_turn(
            back_up("north/silo.toml"),
            lambda w: (w.north / "silo.toml").write_bytes(
                (w.north / "silo.toml").read_text("utf-8").encode("utf-16")
            ),
        ),
        restore("north/silo.toml"),
    ),
    "a policy that no plan fits": Mistake(
        lambda w: ["silo", "check", w.north],
        3,
        "",
        edit_text("north/policy.toml", "budget_epsilon", "budget_epsilom"),
        edit_text("north/policy.toml", "budget_epsilom", "budget_epsilon"),
        repeated_command=lambda w: ["silo", "ledger", "show", w.north],
    ),
    # Too early, too late, twice
    "approving what is not there": Mistake(
        lambda w: ["silo", "approve", w.south, "--digest", w.digest],
        34,
        "nothing is left to approve",
        repeated_command=status_command,
    ),
    "approving another digest": Mistake(
        lambda w: ["silo", "approve", w.north, "--digest", "0" * 64],
        34,
        "silo review",
        repeated_command=lambda w: ["silo", "approve", w.north, "--digest", w.digest],
    ),
    "approving the first letters": Mistake(
        lambda w: ["silo", "approve", w.north, "--digest", w.digest[:16]],
        34,
        "silo review",
        repeated_command=lambda w: ["silo", "review", w.north],
    ),
    "withdrawing in a script without a word of consent": Mistake(
        lambda w: ["silo", "withdraw", w.north, *w.secret],
        3,
        "Add --yes",
        repeated_command=lambda w: ["silo", "approve", w.north, "--digest", w.digest],
    ),
    "reviewing too late": Mistake(
        lambda w: ["silo", "review", w.south],
        3,
        "silo status",
        repeated_command=lambda w: ["silo", "status", w.south],
    ),
    "publishing a rehearsal as a release": Mistake(
        lambda w: ["aggregator", "publish", w.fed, "--out", w.path / "new", *w.secret],
        31,
        "--rehearsal",
        repeated_command=lambda w: ["aggregator", "status", w.fed],
    ),
    "a federation without a licence": Mistake(
        lambda w: ["aggregator", "init", w.path / "new", "--name", "a", "--address", "a:1"],
        3,
        "Add --licence",
        repeated_command=lambda w: ["aggregator", "status", w.fed],
    ),
    "withdrawing before the first plan": Mistake(
        lambda w: ["silo", "withdraw", w.path / "west", *w.secret],
        34,
        "silo run",
        lambda w: run_command(*w.init("west")),
        repeated_command=lambda w: ["silo", "status", w.path / "west"],
    ),
    "options of the images' page without it": Mistake(
        lambda w: ["silo", "review", w.north, "--list"],
        3,
        "--images",
        repeated_command=lambda w: ["silo", "review", w.north],
    ),
    "a release over another one": Mistake(
        lambda w: [
            "aggregator",
            "publish",
            w.fed,
            "--rehearsal",
            "--out",
            w.path / "release",
            *w.secret,
        ],
        6,
        "",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "a router before the submissions": Mistake(
        lambda w: ["aggregator", "router", w.fed],
        3,
        "aggregator run",
        repeated_command=lambda w: ["aggregator", "status", w.fed],
    ),
    # Plans
    "a recipe that is not there": Mistake(
        lambda w: w.plan(recipe=w.path / "p.toml"),
        4,
        "p.toml",
        repeated_command=lambda w: [*w.plan(), "--yes"],
    ),
    "recipe and images swapped": Mistake(
        lambda w: [*w.plan(recipe=w.path / "public.npz", public=w.path / "plan.toml"), "--yes"],
        3,
        "public.npz",
    ),
    "nobody to confirm": Mistake(
        lambda w: w.plan(), 3, "--yes", repeated_command=lambda w: [*w.plan(), "--yes"]
    ),
    "too few public images": Mistake(
        lambda w: [*w.plan(public=w.path / "few.npz"), "--yes"],
        7,
        "more public images",
        lambda w: np.savez(w.path / "few.npz", images=images(3, 0.0, seed=1)),
        repeated_command=lambda w: [*w.plan(), "--yes"],
    ),
    "a key that does not exist": Mistake(
        lambda w: ["aggregator", "rotate", w.fed, "rooot", *w.secret],
        3,
        "one of root",
        repeated_command=lambda w: ["aggregator", "status", w.fed],
    ),
    # Damage
    "a ledger edited by hand": Mistake(
        lambda w: ["silo", "ledger", "verify", w.north],
        35,
        "Restore the ledger",
        in_turn(
            back_up("north/private/ledger.jsonl"), flip_bit("north/private/ledger.jsonl", -100)
        ),
        restore("north/private/ledger.jsonl"),
    ),
    "a state cut short": Mistake(
        status_command,
        21,
        "Restore private/state.json",
        in_turn(
            back_up("north/private/state.json"), copy_file("empty", "north/private/state.json")
        ),
        restore("north/private/state.json"),
    ),
    "a byte of a release": Mistake(
        lambda w: ["ddm", "verify", *w.release()],
        12,
        "Fetch it again",
        in_turn(
            back_up("release/targets/*/silos/north/experts/north/expert.safetensors"),
            flip_bit("release/targets/*/silos/north/experts/north/expert.safetensors"),
        ),
        restore("release/targets/*/silos/north/experts/north/expert.safetensors"),
    ),
    "a note in a release": Mistake(
        lambda w: ["ddm", "verify", *w.release()],
        15,
        "Remove the file",
        lambda w: (w.path / "release" / "targets" / "notes.txt").touch(),
        lambda w: (w.path / "release" / "targets" / "notes.txt").unlink(),
    ),
    # Samples
    "no images wanted": Mistake(
        lambda w: ["ddm", "sample", *w.release("--num", 0, "--out", w.path / "a.png")],
        2,
        "--num",
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
    "a format that nobody writes": Mistake(
        lambda w: [
            "ddm",
            "sample",
            *w.release("--num", 1, "--steps", 1, "--out", w.path / "a.jpg"),
        ],
        3,
        ".png",
        repeated_command=lambda w: [
            "ddm",
            "sample",
            *w.release("--num", 1, "--steps", 1, "--out", w.path / "neu" / "ä b.png"),
        ],
    ),
    "a silo that is not in the release": Mistake(
        lambda w: [
            "ddm",
            "sample",
            *w.release("--num", 1, "--steps", 1, "--prior", "mars=1", "--out", w.path / "a.png"),
        ],
        3,
        "north, south",
        repeated_command=lambda w: [
            "ddm",
            "sample",
            *w.release("--num", 1, "--steps", 1, "--prior", "north=1", "--out", w.path / "a.png"),
        ],
    ),
    "the root of others": Mistake(
        lambda w: [
            "ddm",
            "verify",
            w.path / "release",
            "--root",
            w.path / "fed 2" / "tuf" / "metadata" / "1.root.json",
        ],
        19,
        "root's code",
        lambda w: run_command(
            "aggregator",
            "init",
            w.path / "fed 2",
            "--name",
            "b",
            "--licence",
            "CC-BY-4.0",
            "--address",
            "127.0.0.1:1",
            *w.secret,
        ),
        repeated_command=lambda w: ["ddm", "verify", *w.release()],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_ends_with_a_documented_code_and_its_remedy_helps(
    name: str, world: WaitingFederation
) -> None:
    # Here, since the record is made from the mistakes of this file.
    from tests.support.typed_remedies import recorded_remedies

    typed_remedy = type_remedy(name, MISTAKES[name], world)
    assert typed_remedy is not None or MISTAKES[name].code in (2, 8)
    assert typed_remedy == recorded_remedies().get(name), (
        "write the record again: python -m tests.support.typed_remedies"
    )


def test_there_are_forty_mistakes_and_more() -> None:
    assert len(MISTAKES) >= 40


def test_approving_twice_changes_nothing(world: WaitingFederation) -> None:
    approve = ["silo", "approve", world.north, "--digest", world.digest]
    assert type_command(approve).code == 0
    approval = world.north / "private" / "approval.json"
    before = approval.read_bytes()
    assert type_command(approve).code == 0 and approval.read_bytes() == before
    assert world.tiny.work("north", until="in_outbox").sequence == 1
    result = type_command(approve)
    assert result.code == 34 and "The submission was sent" in result.err


def test_right_digest_is_not_shown_when_another_one_is_approved(
    world: WaitingFederation,
) -> None:
    result = type_command(["silo", "approve", world.north, "--digest", "0" * 64])
    assert result.code == 34
    assert world.digest not in result.err


def test_second_worker_is_told_of_the_first_and_a_lock_left_by_a_dead_one_holds_nobody(
    world: WaitingFederation,
) -> None:
    with locked(world.north / "private", "worker"):
        result = type_command(["silo", "withdraw", world.north, "--yes", *world.secret])
    assert result.code == 6 and "to do:" in result.err
    left = list((world.north / "private").glob("*lock*")) + list(
        (world.north / "private").glob(".*lock*")
    )
    assert left, "the file of the lock stays"
    assert type_command(["silo", "withdraw", world.north, "--yes", *world.secret]).code == 0


def test_busy_port_after_invitations_went_out_and_the_remedy_reaches_the_next_silo(
    world: WaitingFederation,
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        edit_text("fed/federation.toml", "9092", str(port))(world)
        result = type_command(["aggregator", "run", world.fed, *world.secret])
    assert result.code == 6
    assert "aggregator invite FED --address HOST:PORT" in result.err
    # What a site does that has joined already is in tests/silo/commands/test_join.py.
    invited = type_command(["aggregator", "invite", world.fed, "--address", "127.0.0.1:9093"])
    assert invited.code == 0, invited.err
    assert type_command(world.init()).code == 0
    assert 'address = "127.0.0.1:9093"' in (world.path / "Klinik Süd" / "silo.toml").read_text(
        "utf-8"
    )


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """A disk that takes so much of each file: what a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_and_a_folder_of_somebody_else_say_so_and_leave_nothing_half(
    world: WaitingFederation,
) -> None:
    card = ["silo", "enroll", world.north, "--out", world.path / "new" / "card.json", *world.secret]
    with small_files(64):
        result = type_command(card)
    assert result.code == 8 and "Make room" in result.err
    assert not list(world.path.glob("new/*"))
    assert type_command(card).code == 0
    # root, too, may write nothing there
    result = type_command([*card[:4], "/proc/1/card.json", *world.secret])
    assert result.code == 8 and "to do:" in result.err


INTERRUPTED = {
    "aggregator plan": lambda w: [*w.plan(), "--yes"],
    "silo init": lambda w: w.init(),
    "ddm verify": lambda w: ["ddm", "verify", *w.release()],
    "ddm sample": lambda w: [
        "ddm",
        "sample",
        *w.release("--num", 64, "--steps", 40, "--out", w.path / "a.npz"),
    ],
    "silo review": lambda w: ["silo", "review", w.north],
    "silo service": lambda w: ["silo", "service", w.south, "--out", w.path / "units"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_anywhere_ends_in_one_line_and_the_same_command_ends_well(
    name: str, world: WaitingFederation
) -> None:
    settings = world.south / "silo.toml"
    settings.write_text(
        f'passphrase_file = "{world.path / "pass"}"\n' + settings.read_text("utf-8"), "utf-8"
    )
    words = INTERRUPTED[name](world)
    line = [str(program(str(words[0]))), *map(str, words[1:])]
    started = time.monotonic()
    copied = WaitingFederation(world.tiny.copy(world.path.parent / "undisturbed"))
    undisturbed = INTERRUPTED[name](copied)
    subprocess.run(
        [str(program(str(undisturbed[0]))), *map(str, undisturbed[1:])],
        check=name != "silo service",
    )
    lasted = time.monotonic() - started
    for part in range(1, 9):
        with case(part=part):
            process = subprocess.Popen(
                line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            try:
                _, err = process.communicate(timeout=lasted * part / 9)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=120)
            assert "Traceback" not in err and len(err.splitlines()) <= MAX_LINES, err
            assert process.returncode in (0, 6, 130), err
            if process.returncode == 0:
                break
    again = subprocess.run(line, capture_output=True, text=True, check=False)
    assert again.returncode in (0, 6), again.stderr
    assert again.returncode == 0 or name == "silo init", again.stderr
