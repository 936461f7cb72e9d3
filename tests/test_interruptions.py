"""What a command says when Ctrl-C or SIGTERM ends it is what it does: it goes on, or it begins again."""

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tomli_w

import aggregator.cli
import ddm.cli.main
import silo.cli
from ddm.system.processes import program
from tests.conftest import PublishedRelease
from tests.support.commands import APPS
from tests.support.federation import PASSPHRASE, images, recipe
from tests.support.islands import Owner

Words = list[object]
LIMIT_S = 240
BEGINS_AGAIN = "the same command begins again."
GOES_ON = "The same command goes on from there."
RESUMABLE = {
    "silo": silo.cli.RESUMABLE,
    "aggregator": aggregator.cli.RESUMABLE,
    "ddm": ddm.cli.main.RESUMABLE,
}


@dataclass(frozen=True)
class Workplace:
    """A published federation, files beside it, and the islands of one owner."""

    published: PublishedRelease
    path: Path
    owner: Owner

    def release(self, *words: object) -> Words:
        """The options of a command of `ddm` about the release."""
        known = (self.published.release, "--root", self.published.root)
        return [*known, "--state", self.path / "state", *words]

    @property
    def federation(self) -> Path:
        return self.published.tiny.federation.path

    def split(self) -> Words:
        """`ddm split` of the owner's data."""
        owner = self.owner
        return [
            *("ddm", "split", "--data", owner.path / "data.npz", "--out", owner.run),
            *("--recipe", owner.path / "plan.toml", "--passphrase-file", owner.path / "pass"),
        ]


@pytest.fixture
def workplace(published: PublishedRelease, tmp_path: Path) -> Workplace:
    np.savez(tmp_path / "real.npz", images=images(400, 0.0, seed=5))
    (tmp_path / "pass").write_bytes(PASSPHRASE + b"\n")
    return Workplace(published, tmp_path, Owner.make(tmp_path / "owner", steps=400))


def write_base_recipe(workplace: Workplace) -> None:
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["base"] = {
        "kind": "trained",
        "folder": str(workplace.path / "base"),
        "licence": "CC0-1.0",
        "training": {"num_steps": 100_000, "batch_size": 8, "precision": "fp32"},
    }
    (workplace.path / "base.toml").write_bytes(tomli_w.dumps(described).encode())


def split_first(workplace: Workplace) -> None:
    subprocess.run(command_line(workplace.split()), check=True, capture_output=True)


@dataclass(frozen=True)
class InterruptedWork:
    """A command that is interrupted once it has begun to work.

    Attributes:
        words: what is typed.
        label: a part of the line that it prints when its work begins.
        output: what must not be there afterwards, since it is written at the end.
        prepare: what comes before.
    """

    words: Callable[[Workplace], Words]
    label: str
    output: Callable[[Workplace], Path]
    prepare: Callable[[Workplace], None] = lambda workplace: None


def command_line(words: Words) -> list[str]:
    return [str(program(str(words[0]))), *map(str, words[1:])]


WORK = {
    "ddm evaluate": InterruptedWork(
        lambda w: [
            *("ddm", "evaluate", *w.release("--num", 4000, "--out", w.path / "page")),
            *("--reference", w.path / "real.npz"),
        ],
        "sampling",
        lambda w: w.path / "page" / "index.html",
    ),
    "ddm sample": InterruptedWork(
        lambda w: ["ddm", "sample", *w.release("--num", 4000, "--out", w.path / "a.npz")],
        "sampling",
        lambda w: w.path / "a.npz",
    ),
    "ddm distill": InterruptedWork(
        lambda w: ["ddm", "distill", *w.release("--out", w.path / "s.safetensors")],
        "drawing",
        lambda w: w.path / "s.safetensors",
    ),
    "ddm train": InterruptedWork(
        lambda w: ["ddm", "train", w.owner.run, "--device", "cpu"],
        "island",
        lambda w: w.owner.run / "islands" / "1" / "trained.json",
        split_first,
    ),
    "aggregator router": InterruptedWork(
        lambda w: ["aggregator", "router", w.federation],
        "Training",
        lambda w: w.federation / "router" / "nothing",
    ),
    "aggregator base": InterruptedWork(
        lambda w: [
            *("aggregator", "base", w.federation, "--recipe", w.path / "base.toml"),
            *("--public", w.path / "real.npz", "--device", "cpu"),
        ],
        "base",
        lambda w: w.path / "base" / "base.json",
        write_base_recipe,
    ),
}


def interrupt(
    work: InterruptedWork, workplace: Workplace, number: signal.Signals
) -> tuple[int, str]:
    """Start a command, send the signal when its work begins, and return its exit code and what it said."""
    process = subprocess.Popen(
        command_line(work.words(workplace)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        begun = [line for line in lines if work.label in line and not process.send_signal(number)]
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert begun, err
    return process.returncode, err


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ddm evaluate", signal.SIGTERM),
        *(
            pytest.param(name, number, marks=pytest.mark.slow)
            for name in WORK
            for number in (signal.SIGINT, signal.SIGTERM)
            if (name, number) != ("ddm evaluate", signal.SIGTERM)
        ),
    ],
)
def test_interrupted_command_says_whether_it_goes_on_and_leaves_no_half_of_its_output(
    name: str, number: signal.Signals, workplace: Workplace
) -> None:
    work = WORK[name]
    work.prepare(workplace)
    code, err = interrupt(work, workplace, number)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], err
    program_name, command = name.split()
    is_resumable = command in {known.name for known in RESUMABLE[program_name]}
    assert err.strip().endswith(GOES_ON if is_resumable else BEGINS_AGAIN)
    assert not work.output(workplace).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddm distill", "ddm train"])
def test_command_that_says_so_goes_on_from_what_it_kept(name: str, workplace: Workplace) -> None:
    work = WORK[name]
    work.prepare(workplace)
    interrupt(work, workplace, signal.SIGINT)
    kept = {
        path: path.stat().st_mtime_ns
        for path in workplace.path.rglob("*")
        if path.is_file() and path.suffix == ".safetensors"
    }
    again = subprocess.run(
        command_line(work.words(workplace)), capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert work.output(workplace).exists()
    # What was finished before is not made again.
    for path, written_at in kept.items():
        if path.exists():
            assert path.stat().st_mtime_ns == written_at, path


def test_commands_that_go_on_are_commands_of_their_programs() -> None:
    for program_name, commands in RESUMABLE.items():
        names = {
            command.name or str(getattr(command.callback, "__name__", ""))
            for command in APPS[program_name].registered_commands
        }
        assert {command.name for command in commands} <= names
