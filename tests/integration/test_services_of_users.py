"""From the wheel alone: two silos as services of two real users each, by the words of the units that we wrote.

systemd does not run here. What its units add to the users is done by hand where a test can: the worker has a network of
its own with loopback only, and every environment is empty.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddm.system.processes import terminate_all
from tests.support.installed import python_for_everyone
from tests.support.operators import SILOS, Operators, set_up_federation
from tests.support.services import UnitFile

HOUSEBREAKER = Path(__file__).parents[1] / "support" / "housebreaker.py"
EMPTY = ("env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin", "LANG=C.UTF-8")
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("runuser", "unshare", "ip", "useradd"))),
        reason="needs root, who makes users and gives each service its own",
    ),
]


@pytest.fixture
def operators(installed_for_everyone: Path) -> Iterator[Operators]:
    programs = installed_for_everyone
    folder = programs.parents[1] / "Klinik Süd"
    folder.mkdir(mode=0o755)
    operators = Operators(folder, programs=programs)
    users: list[str] = [
        f"arch{os.getpid()}{name}" for name in ("agg", *(f"{s}{h}" for s in SILOS for h in "wc"))
    ]
    try:
        yield operators
    finally:
        terminate_all(operators.running.values())
        for user in users:
            with suppress(subprocess.CalledProcessError):
                subprocess.run(["userdel", user], check=True, capture_output=True)
        for silo in SILOS:
            subprocess.run(
                ["groupdel", f"arch{os.getpid()}{silo}"], check=False, capture_output=True
            )


def name_of(part: str) -> str:
    return f"arch{os.getpid()}{part}"


def prepare(folder: Path) -> None:
    result = subprocess.run(
        ["sh", folder / "prepare.sh"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def serve_as_written(operators: Operators) -> None:
    """Do what `silo service` and `aggregator service` tell root to do, and start what their units say."""
    folder = operators.folder
    for settings in (
        operators.fed / "federation.toml",
        *(folder / silo / "silo.toml" for silo in SILOS),
    ):
        assert "passphrase_file" in settings.read_text("utf-8")
    operators.call(
        "aggregator",
        "service",
        operators.fed,
        "--out",
        folder / "fed.units",
        "--user",
        name_of("agg"),
    )
    for silo in SILOS:
        # Each half reads a passphrase file of its own: the script gives it to the user.
        secret = folder / f"{silo}.pass"
        secret.write_bytes((folder / "pass").read_bytes())
        settings = folder / silo / "silo.toml"
        settings.write_text(
            settings.read_text("utf-8").replace(str(folder / "pass"), str(secret)), "utf-8"
        )
        names = (
            "--worker-user",
            name_of(f"{silo}w"),
            "--courier-user",
            name_of(f"{silo}c"),
            "--group",
            name_of(silo),
        )
        operators.call("silo", "service", folder / silo, "--out", folder / f"{silo}.units", *names)
        data = folder / f"{silo}.npz"
        data.chmod(0o644)
        refused = subprocess.run(["sh", folder / f"{silo}.units" / "prepare.sh"], capture_output=True, text=True,
                                 check=False)  # fmt: skip
        assert refused.returncode == 1 and "take them from others" in refused.stderr, refused.stderr
        shutil.chown(data, name_of(f"{silo}w"))
        data.chmod(0o600)
        prepare(folder / f"{silo}.units")
    prepare(folder / "fed.units")
    for path in sorted(folder.glob("*.units/*.service")):
        unit = UnitFile.read(path)
        service = path.stem.removeprefix("archipelago-")
        alone = ALONE if unit.settings.get("PrivateNetwork") == ["yes"] else ()
        assert bool(alone) == service.endswith("worker")
        (user,) = unit.settings["User"]
        operators.prefix[service] = [*EMPTY, *alone, "runuser", "-u", user, "--"]
        operators.serve_command(service, unit.command())


def break_in(user: str, wanted: dict[str, list[str]]) -> dict[str, list[str]]:
    """Run a thief as a user of the machine, and return what it got."""
    command = ["runuser", "-u", user, "--", *EMPTY, str(python_for_everyone())]
    with HOUSEBREAKER.open() as program:
        result = subprocess.run([*command, "-", json.dumps(wanted)], stdin=program, capture_output=True, text=True,
                              check=True, cwd="/")  # fmt: skip
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_two_silos_run_as_the_units_say_and_code_in_the_couriers_place_gets_nothing(
    operators: Operators,
) -> None:
    folder = operators.folder
    set_up_federation(operators, num_steps=400)
    serve_as_written(operators)
    site = folder / "north"
    state = site / "private" / "state.json"
    operators.wait_until(
        lambda: state.exists() and b'"training"' in state.read_bytes(), "the training"
    )
    private = [
        folder / "north.npz",
        folder / "north.pass",
        site / "private",
        *(site / "private").rglob("*"),
    ]
    others = [
        folder / "south.npz",
        folder / "south" / "courier",
        folder / "south" / "private",
        operators.fed,
    ]
    address = json.loads((operators.fed / "invitation.json").read_text())["address"]
    wanted = {
        "read": [str(path) for path in (*private, *others)],
        "write": [
            str(path) for path in (*private, *others, site, site / "outbox", site / "silo.toml")
        ],
        "connect": [address],
    }
    got = break_in(name_of("northc"), wanted)
    assert got == {"read": [], "write": [], "connect": [address], "processes": [], "find": []}
    mine = [
        site / "courier" / "node.key",
        site / "courier" / "flwr",
        site / "silo.toml",
        site / "outbox",
    ]
    got = break_in(
        name_of("northc"), {"read": [str(path) for path in mine], "write": [str(site / "inbox")]}
    )
    assert (got["read"], got["write"]) == ([str(path) for path in mine], [str(site / "inbox")])
    got = break_in(
        name_of("northw"), {"read": [str(path) for path in private], "write": [str(site / "inbox")]}
    )
    assert len(got["read"]) > 10
    assert got["write"] == []
    # Programs that hold keys or images close their memory, also to others of the same user; the control is root.
    assert got["processes"] == []
    assert break_in("root", {})["processes"]
    operators.wait_until(
        lambda: all(
            operators.ended_well(service)
            for service in operators.running
            if "courier" not in service
        ),
        "the receipts",
    )
    assert not any(operators.num_restarts.values()), operators.logs()
    for silo in SILOS:
        (submission,) = (folder / silo / "outbox").rglob("submission.json")
        assert json.loads(submission.read_bytes())["isolation"] == "users"
    fed_user = ["runuser", "-u", name_of("agg"), "--"]
    for words in (
        ["router", operators.fed],
        ["publish", operators.fed, "--rehearsal", "--out", operators.fed / "release"],
    ):
        command = [*EMPTY, *fed_user, operators.programs / "aggregator", *words]
        done_by = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert done_by.returncode == 0, done_by.stdout + done_by.stderr
    root = operators.fed / "tuf" / "metadata" / "1.root.json"
    said = operators.call(
        "ddm", "verify", operators.fed / "release", "--root", root, "--state", folder / "state"
    )
    assert "none unlisted" in said
