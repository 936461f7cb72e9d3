"""A federation in which people make mistakes, and how a mistake and its remedy are written down."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from ddm.protocol.base import sha256_file
from tests.support.commands import CommandResult, run_command
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    TinyFederation,
    images,
    recipe,
    write_policy,
)
from tools.reference.remedies import remedies

Words = list[object]
ERROR_PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "errors.md"
CODES = {
    int(code) for code in re.findall(r"^\| (\d+) \|", ERROR_PAGE.read_text("utf-8"), re.MULTILINE)
}
MAX_LINES = 24


@dataclass(frozen=True)
class WaitingFederation:
    """A federation in a folder with blanks and an umlaut: a release is out, and north's second submission waits."""

    tiny: TinyFederation

    @classmethod
    def create(cls, path: Path) -> "WaitingFederation":
        """Make one in a new folder, which takes some seconds."""
        tiny = TinyFederation.create(path, {"north": 40, "south": 30})
        rich: dict[str, Any] = POLICY | {"privacy": {"budget_epsilon": 100.0, "budget_delta": 1e-3}}
        for site in tiny.sites.values():
            write_policy(site, rich)
        tiny.complete(tiny.path / "release")
        write_policy(tiny.sites["north"], rich | {"approval": {"kind": "person"}})
        tiny.deliver_plan("north", tiny.sign())
        tiny.work("north", until="plan_accepted")
        tiny.work("north", until="awaiting_approval")
        (tiny.path / "pass").write_bytes(PASSPHRASE + b"\n")
        (tiny.path / "wrong").write_text("wrong\n")
        (tiny.path / "empty").touch()
        return cls(tiny)

    def copy(self, path: Path) -> "WaitingFederation":
        """Return a copy in another folder, which a test may change."""
        return WaitingFederation(self.tiny.copy(path))

    @property
    def path(self) -> Path:
        return self.tiny.path

    @property
    def fed(self) -> Path:
        return self.tiny.federation.path

    @property
    def north(self) -> Path:
        return self.tiny.sites["north"].path

    @property
    def south(self) -> Path:
        return self.tiny.sites["south"].path

    @property
    def secret(self) -> Words:
        return ["--passphrase-file", self.path / "pass"]

    @property
    def digest(self) -> str:
        return str(
            json.loads((self.north / "private" / "state.json").read_text())["submission_digest"]
        )

    @property
    def invitation_digest(self) -> str:
        return sha256_file(self.fed / "invitation.json")

    def init(self, name: str = "Klinik Süd", **changes: object) -> Words:
        """`silo init` for a new silo."""
        options = {
            "id": "west",
            "data": self.path / "north.npz",
            "invitation": self.fed / "invitation.json",
        }
        options |= {
            "code": self.invitation_digest,
            "passphrase-file": self.path / "pass",
        } | changes
        return [
            "silo",
            "init",
            self.path / name,
            *(word for key, value in options.items() for word in (f"--{key}", value)),
        ]

    def plan(self, **changes: object) -> Words:
        """`aggregator plan` with a recipe and public images that fit."""
        (self.path / "plan.toml").write_text(
            tomli_w.dumps(recipe().model_dump(mode="json", exclude_none=True))
        )
        np.savez(self.path / "public.npz", images=images(120, 0.0, seed=1))
        files = {"recipe": self.path / "plan.toml", "public": self.path / "public.npz"} | changes
        options = [word for key, value in files.items() for word in (f"--{key}", value)]
        return ["aggregator", "plan", self.fed, *options, *self.secret]

    def release(self, *words: object) -> Words:
        """The options of a command of `ddm` about the release."""
        return [
            self.path / "release",
            "--root",
            self.tiny.root,
            "--state",
            self.path / "memory",
            *words,
        ]

    def enroll(self, *words: object) -> Words:
        """`silo enroll` of north."""
        return ["silo", "enroll", self.north, "--out", self.path / "card.json", *words]


Step = Callable[[WaitingFederation], object]


def do_nothing(world: WaitingFederation) -> None:
    """No need to do anything."""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        command: the words that are typed.
        code: its exit code.
        message: a text that it must print.
        prepare: brings about what went wrong before.
        remedy: what the person does, as the message says.
        repeated_command: the words that are typed then; the same ones when None.
        final_code: the exit code of those.
    """

    command: Callable[[WaitingFederation], Words]
    code: int
    message: str
    prepare: Step = do_nothing
    remedy: Step = do_nothing
    repeated_command: Callable[[WaitingFederation], Words] | None = None
    final_code: int = 0


def edit_text(name: str, old: str, new: str) -> Step:
    """Change a text file of the world."""

    def change(world: WaitingFederation) -> None:
        path = world.path / name
        text = path.read_text("utf-8")
        assert old in text, (name, old)
        path.write_text(text.replace(old, new, 1), "utf-8")

    return change


def move_file(source: str, target: str) -> Step:
    return lambda world: (world.path / source).rename(world.path / target)


def copy_file(source: str, target: str) -> Step:
    return lambda world: shutil.copyfile(world.path / source, world.path / target)


def flip_bit(name: str, at: int = -3) -> Step:
    def change(world: WaitingFederation) -> None:
        path = next(world.path.glob(name))
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(bytes(data))

    return change


def back_up(name: str) -> Step:
    return lambda world: shutil.copyfile(next(world.path.glob(name)), world.path / "backup")


def restore(name: str) -> Step:
    return lambda world: shutil.copyfile(world.path / "backup", next(world.path.glob(name)))


def in_turn(*steps: Step) -> Step:
    return lambda world: [step(world) for step in steps]


def status_command(world: WaitingFederation) -> Words:
    return ["silo", "status", world.north]


def toml_slip(old: str, new: str, says: str) -> Mistake:
    """A slip in silo.toml, mended where the message says."""
    return Mistake(
        status_command,
        3,
        says,
        edit_text("north/silo.toml", old, new),
        edit_text("north/silo.toml", new, old),
    )


@dataclass(frozen=True)
class TypedRemedy:
    """A remedy that was printed in a state, and how the command ended that was typed after it was done.

    Attributes:
        state: in words.
        code: the exit code of the error.
        remedy: the text as it is written in the code.
        final_code: the exit code of the command that was typed then.
    """

    state: str
    code: int
    remedy: str
    final_code: int


def printed_remedy(result: CommandResult) -> str | None:
    """Return what a command printed after `to do:`; None where it printed no remedy."""
    _, mark, remedy = result.err.partition("  to do:    ")
    if mark:
        return remedy.strip()
    # A report of checks is no error message; what fails comes first there, and has its remedy on one line.
    _, mark, remedies_and_more = result.out.partition("  to do:    ")
    if not mark:
        return None
    return remedies_and_more.splitlines()[0].strip()


def type_command(words: Words) -> CommandResult:
    """Type a command, and look at the form of what it says."""
    result = run_command(*words)
    assert result.code in CODES, result.err
    assert len(result.err.splitlines()) <= MAX_LINES, result.err
    return result


def type_remedy(state: str, mistake: Mistake, world: WaitingFederation) -> TypedRemedy | None:
    """Make a mistake, do what its remedy says, and type a command again.

    Returns:
        The remedy; None where the error printed none, as one of an option does.
    """
    mistake.prepare(world)
    result = type_command(mistake.command(world))
    assert result.code == mistake.code, (state, result.err, result.out)
    assert mistake.message in result.err + result.out, (state, result.err, result.out)
    remedy = printed_remedy(result)
    mistake.remedy(world)
    final_code = mistake.code
    if mistake.remedy is not do_nothing or mistake.repeated_command:
        again = type_command((mistake.repeated_command or mistake.command)(world))
        assert again.code == mistake.final_code, (state, again.err, again.out)
        final_code = mistake.final_code
    if remedy is None:
        return None
    matching = [known for known in remedies() if known.matches(remedy)]
    assert matching, (state, remedy)
    # Of two that fit, the one that leaves less to be filled in.
    best = max(matching, key=lambda known: known.num_fixed_characters)
    return TypedRemedy(state, mistake.code, best.text, final_code)
