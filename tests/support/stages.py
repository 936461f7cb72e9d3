"""A federation at each stage of its work, and the commands that an operator gives there, for trials on copies of it."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np
import tomli_w

from aggregator.intake.inventory import take_inventory
from aggregator.router.train import train_router
from ddm.protocol.base import sha256_file
from silo.worker.pause import pause, resume
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    TinyFederation,
    images,
    recipe,
    write_policy,
)

NORTH = "north"
SOUTH = "south"


@dataclass(frozen=True)
class CommandCase:
    """A command, and what must be as after an undisturbed run once it was given again.

    Attributes:
        name: of the case.
        stage: where it is given.
        words: program and arguments; `{at}` stands for the folder with everything.
        same: files whose bytes do not depend on when the command ran.
        instead: commands, each after an exit code, that the message of a refused repetition names: tried in its place.
        checks: commands that end with 0 afterwards.
    """

    name: str
    stage: str
    words: Sequence[str]
    same: Sequence[str] = ()
    instead: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checks: Sequence[Sequence[str]] = ()

    def command_line(self, words: Sequence[str], at: Path) -> list[str]:
        """Return a command as it is typed for a copy of the federation."""
        known = {"{at}": str(at), "{draft}": _draft(at), "{invitation}": _invitation_digest(at)}
        return [
            reduce(lambda text, name: text.replace(name, known[name]), known, word)
            for word in words
        ]


def _draft(at: Path) -> str:
    state = at / NORTH / "private" / "state.json"
    if not state.exists():
        return ""
    return str(json.loads(state.read_text())["submission_digest"])


def _invitation_digest(at: Path) -> str:
    invitation = at / "invitation.json"
    if not invitation.exists():
        return ""
    return sha256_file(invitation)


def make_stages(folder: Path, until: str = "published") -> dict[str, Path]:
    """Make a federation, and keep a copy of each stage; return the copies.

    - empty: passphrase, invitation and data, of which a federation or a site can be made
    - founded: two silos are enrolled
    - waiting: a submission waits for a person at north
    - paused: and its site is paused
    - accepted: both silos have their receipts
    - routed: the router is trained
    - published: there is a release
    """
    stages: dict[str, Path] = {}
    for stage, at in _work(folder / "now"):
        stages[stage] = Path(shutil.copytree(at, folder / stage))
        if stage == until:
            break
    return stages


def _work(at: Path) -> Iterator[tuple[str, Path]]:
    """Do the work of a federation; yield where its files are whenever a stage is reached."""
    tiny = TinyFederation.create(at, {NORTH: 60, SOUTH: 40})
    (at / "pass").write_bytes(PASSPHRASE + b"\n")
    empty = at.with_name("nothing")
    empty.mkdir()
    for path in (at / "pass", at / f"{NORTH}.npz", tiny.federation.path / "invitation.json"):
        shutil.copy(path, empty)
    yield "empty", empty
    (at / "plan.toml").write_bytes(
        tomli_w.dumps(recipe().model_dump(mode="json", exclude_none=True)).encode()
    )
    np.savez(
        at / "public.npz",
        images=np.concatenate([images(120, centre, seed=90) for centre in (-0.5, 0.5)]),
    )
    yield "founded", at
    plan_id = tiny.sign()
    for silo_id in (NORTH, SOUTH):
        tiny.deliver_plan(silo_id, plan_id)
    write_policy(tiny.sites[NORTH], POLICY | {"approval": {"kind": "person"}})
    tiny.work(NORTH, until="awaiting_approval")
    yield "waiting", at
    pause(tiny.sites[NORTH])
    yield "paused", at
    resume(tiny.sites[NORTH])
    write_policy(tiny.sites[NORTH], POLICY)
    for silo_id in (NORTH, SOUTH):
        tiny.work(silo_id)
        tiny.collect(silo_id, plan_id)
    tiny.take_in()
    for silo_id in (NORTH, SOUTH):
        tiny.deliver_receipt(silo_id, plan_id)
        tiny.work(silo_id, until="accepted")
    yield "accepted", at
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    yield "routed", at
    tiny.publish_only(at / "release")
    yield "published", at


_KEYS = ("--passphrase-file", "{at}/pass")
_ROOT = ("--root", "{at}/fed/tuf/metadata/1.root.json", "--state", "{at}/state")
_PUBLISH = ("aggregator", "publish", "{at}/fed", "--rehearsal", "--out", "{at}/out", *_KEYS)
_VERIFY = ("ddm", "verify", "{at}/out", *_ROOT)
_LOG = ("aggregator", "log", "{at}/fed", *_KEYS)
_AGAIN = ("aggregator", "publish", "{at}/fed", "--rehearsal", "--out", "{at}/again", *_KEYS)
_NORTH = "{at}/north"
_DECISIONS = ("silo", "log", "verify", _NORTH)
_STATUS = ("aggregator", "status", "{at}/fed", "--json")
ROTATED = (
    "root",
    "targets",
    "plans",
    "release",
    "online",
    "receipts",
    "log",
    "model-signing",
    "tls",
)
DISTIL = ("ddm", "distill", "{at}/release", *_ROOT, "--num", "8", "--steps", "6", "--out", "{at}/student.safetensors",
          "--device", "cpu")  # fmt: skip

CASES = {
    case.name: case
    for case in (
        CommandCase(
            "aggregator init",
            "empty",
            (
                "aggregator",
                "init",
                "{at}/fed",
                "--name",
                "two",
                "--licence",
                "CC-BY-4.0",
                "--address",
                "127.0.0.1:9092",
                *_KEYS,
            ),
            instead={6: _STATUS},
            checks=(("aggregator", "rotate", "{at}/fed", "root", *_KEYS),),
        ),
        CommandCase(
            "silo init",
            "empty",
            (
                "silo",
                "init",
                "{at}/north",
                "--id",
                NORTH,
                "--data",
                "{at}/north.npz",
                "--invitation",
                "{at}/invitation.json",
                "--code",
                "{invitation}",
                *_KEYS,
            ),
            instead={6: ("silo", "status", _NORTH)},
            checks=(
                (
                    "silo",
                    "enroll",
                    "{at}/north",
                    "--out",
                    "{at}/card.json",
                    "--images",
                    "64",
                    "--patients",
                    "64",
                    *_KEYS,
                ),
            ),
        ),
        CommandCase(
            "silo enroll",
            "founded",
            ("silo", "enroll", "{at}/north", "--out", "{at}/card.json", *_KEYS),
        ),
        CommandCase(
            "aggregator enroll",
            "founded",
            ("aggregator", "enroll", "--yes", "{at}/fed", "{at}/north.card.json"),
            checks=(_STATUS,),
        ),
        CommandCase(
            "aggregator plan",
            "founded",
            (
                "aggregator",
                "plan",
                "{at}/fed",
                "--recipe",
                "{at}/plan.toml",
                "--public",
                "{at}/public.npz",
                "--yes",
                *_KEYS,
            ),
            checks=(_STATUS,),
        ),
        CommandCase(
            "silo approve",
            "waiting",
            ("silo", "approve", "{at}/north", "--digest", "{draft}"),
            same=(
                "north/private/approval.json",
                "north/private/ledger.jsonl",
                "north/private/state.json",
            ),
            checks=(_DECISIONS,),
        ),
        CommandCase("silo pause", "waiting", ("silo", "pause", "{at}/north"), checks=(_DECISIONS,)),
        CommandCase(
            "silo resume", "paused", ("silo", "resume", "{at}/north"), checks=(_DECISIONS,)
        ),
        CommandCase(
            "silo withdraw",
            "waiting",
            ("silo", "withdraw", "{at}/north", "--yes", *_KEYS),
            same=("north/private/ledger.jsonl", "north/private/state.json"),
            instead={34: ("silo", "status", _NORTH)},
            checks=(_DECISIONS,),
        ),
        CommandCase(
            "aggregator router",
            "accepted",
            ("aggregator", "router", "{at}/fed"),
            same=(
                "fed/plans/{plan}/router/router.safetensors",
                "fed/plans/{plan}/router/report.json",
            ),
            checks=(_STATUS, _PUBLISH, _VERIFY),
        ),
        CommandCase(
            "silo rotate",
            "accepted",
            ("silo", "rotate", "{at}/north", "--out", "{at}/card.json", *_KEYS),
            checks=(("aggregator", "enroll", "--yes", "{at}/fed", "{at}/card.json"), _DECISIONS),
        ),
        CommandCase(
            "aggregator withdraw",
            "accepted",
            ("aggregator", "withdraw", "{at}/fed", NORTH, "--reason", "a test", *_KEYS),
            checks=(_STATUS, ("aggregator", "router", "{at}/fed"), _PUBLISH, _VERIFY),
        ),
        CommandCase(
            "aggregator publish", "routed", _PUBLISH, instead={6: _AGAIN}, checks=(_VERIFY, _STATUS)
        ),
        *(
            CommandCase(
                f"aggregator rotate {key}",
                "routed",
                ("aggregator", "rotate", "{at}/fed", key, *_KEYS),
                checks=(_LOG, _PUBLISH, _VERIFY),
            )
            for key in ROTATED
        ),
        CommandCase(
            "aggregator admit",
            "routed",
            ("aggregator", "admit", "{at}/fed", NORTH, "--reason", "a test", "--units", "30"),
            instead={3: _STATUS},
            checks=(_STATUS, ("aggregator", "router", "{at}/fed"), _PUBLISH, _VERIFY),
        ),
        CommandCase(
            "aggregator remove",
            "published",
            ("aggregator", "remove", "{at}/fed", NORTH, "--reason", "a test", *_KEYS),
            instead={4: _STATUS},
            checks=(_STATUS,),
        ),
        CommandCase(
            "aggregator log",
            "published",
            ("aggregator", "log", "{at}/fed", *_KEYS),
            checks=(_STATUS,),
        ),
        CommandCase("ddm verify", "published", ("ddm", "verify", "{at}/release", *_ROOT)),
        CommandCase(
            "ddm sample",
            "published",
            (
                "ddm",
                "sample",
                "{at}/release",
                *_ROOT,
                "--num",
                "2",
                "--steps",
                "2",
                "--out",
                "{at}/drawn.npz",
            ),
            same=("drawn.npz",),
        ),
        CommandCase(
            "ddm distill",
            "published",
            DISTIL,
            same=("student.safetensors",),
            checks=(
                (
                    "ddm",
                    "sample-student",
                    "{at}/student.safetensors",
                    "--num",
                    "1",
                    "--steps",
                    "2",
                    "--out",
                    "{at}/one.npz",
                ),
            ),
        ),
    )
}
