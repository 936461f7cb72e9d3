"""Two silos in rootless containers, as `silo service --kind containers` writes them; a thief in the courier's place.

systemd does not run here; podman is started by the words of the units, as an ordinary user.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddm.system.processes import terminate_all
from tests.support.operators import SILOS, Operators, set_up_federation
from tests.support.podman import AVAILABLE, HOST, Podman, podman_user
from tests.support.services import UnitFile

HOUSEBREAKER = (Path(__file__).parents[1] / "support" / "housebreaker.py").read_bytes()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.containers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not AVAILABLE, reason="needs root, and rootless podman with slirp4netns and fuse-overlayfs"
    ),
]


@pytest.fixture
def podman() -> Iterator[Podman]:
    with podman_user(f"pod{os.getpid()}") as podman:
        if podman.call("info", check=False).returncode:
            pytest.skip("rootless podman does not work here")
        yield podman


@pytest.fixture
def operators(open_folder: Path) -> Iterator[Operators]:
    folder = open_folder / "Klinik Süd"
    folder.mkdir(mode=0o755)
    operators = Operators(folder)
    yield operators
    terminate_all(operators.running.values())


def build_image(podman: Podman, units: Path, wheelhouse: Path, scratch: Path) -> None:
    """Build the image as the Containerfile says."""
    context = scratch / "context"
    shutil.copytree(wheelhouse, context / "wheelhouse")
    shutil.copy(units / "Containerfile", context)
    for path in (context, *context.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    base = podman.with_digest(podman.base_image(scratch / "debian"))
    (line,) = (
        line
        for line in (units / "Containerfile").read_text().splitlines()
        if "podman build --build-arg BASE=IMAGE@DIGEST" in line
    )
    tag = line.split("--tag ")[1].split()[0]
    podman.call("build", "--quiet", f"--build-arg=BASE={base}", "--tag", tag, context)


def break_in(
    podman: Podman, silo: str, half: str, wanted: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Run a thief where one half runs, and return what it got."""
    said = podman.execute(
        f"archipelago-{silo}-{half}", ["python", "-", json.dumps(wanted)], HOUSEBREAKER
    )
    return json.loads(said)  # type: ignore[no-any-return]


def test_two_silos_run_in_containers_and_code_in_the_couriers_place_gets_nothing(
    operators: Operators, podman: Podman, wheelhouse: Path, tmp_path: Path, open_folder: Path
) -> None:
    folder = operators.folder
    set_up_federation(operators, host=HOST, num_steps=400)
    settings = operators.fed / "federation.toml"
    settings.write_text(settings.read_text().replace(f'host = "{HOST}"', 'host = "127.0.0.1"'))
    units: dict[str, UnitFile] = {}
    for silo in SILOS:
        operators.call(
            "silo",
            "service",
            folder / silo,
            "--kind",
            "containers",
            "--out",
            folder / f"{silo}.units",
        )
        for path in sorted((folder / f"{silo}.units").glob("*.service")):
            units[path.stem.removeprefix("archipelago-")] = UnitFile.read(path)
        for path in (folder / f"{silo}.npz", folder / silo, *(folder / silo).rglob("*")):
            shutil.chown(path, podman.user, podman.user)
    build_image(podman, folder / "north.units", wheelhouse, open_folder / "image")
    shutil.chown(folder / "pass", podman.user, podman.user)  # root reads it too
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    for service, unit in units.items():
        operators.prefix[service] = podman.prefix
        operators.serve_command(service, unit.command())
    try:
        look_into_both_halves(operators, podman, folder / "north")
        operators.wait_until(
            lambda: all(
                operators.ended_well(name) for name in operators.running if "courier" not in name
            ),
            "the receipts",
        )
    finally:
        for service, unit in units.items():
            podman.call(*unit.command("ExecStop")[1:])
            assert not operators.running[service].running() or operators.running[service].wait(60)
    assert not any(operators.num_restarts.values()), operators.logs()
    for silo in SILOS:
        (submission,) = (folder / silo / "outbox").rglob("submission.json")
        assert json.loads(submission.read_bytes())["isolation"] == "containers"
    for words in (
        ["router", operators.fed],
        ["publish", operators.fed, "--rehearsal", "--out", folder / "release"],
    ):
        operators.call("aggregator", *words)
    root = operators.fed / "tuf" / "metadata" / "1.root.json"
    said = operators.call(
        "ddm", "verify", folder / "release", "--root", root, "--state", folder / "state"
    )
    assert "none unlisted" in said


def look_into_both_halves(operators: Operators, podman: Podman, site: Path) -> None:
    """While the expert is trained: what code could get in either container."""
    state = site / "private" / "state.json"
    operators.wait_until(
        lambda: state.exists() and b'"training"' in state.read_bytes(), "the training"
    )
    data = site.with_name("north.npz")
    secret = site.with_name("pass")
    private = [data, secret, site / "private", *(site / "private").rglob("*")]
    names = [
        "north.npz",
        "south.npz",
        "pass",
        "silo.key",
        "ledger.jsonl",
        "dataset.salt",
        "draft.json",
        "state.json",
    ]
    address = json.loads((operators.fed / "invitation.json").read_text())["address"]
    wanted = {
        "read": [str(path) for path in (*private, site.with_name("south"), operators.fed)],
        "write": [
            str(path)
            for path in (*private, site, site / "outbox", site / "silo.toml", "/opt/archipelago")
        ],
        "connect": [address],
        "find": names,
    }
    got = break_in(podman, "north", "courier", wanted)
    assert got == {"read": [], "write": [], "connect": [address], "processes": [], "find": []}
    mine = [
        str(path) for path in (site / "courier" / "node.key", site / "silo.toml", site / "outbox")
    ]
    got = break_in(
        podman,
        "north",
        "courier",
        {"read": mine, "write": [str(site / "inbox")], "find": ["node.key"]},
    )
    assert (got["read"], got["write"]) == (mine, [str(site / "inbox")]) and mine[0] in got["find"]
    got = break_in(podman, "north", "worker", {
        "read": [str(path) for path in (data, secret, site / "private", site / "courier")],
        "write": [str(path) for path in (data, secret, site / "inbox", site / "silo.toml")],
        "connect": [address, "1.1.1.1:443", "10.0.2.3:53"], "find": ["node.key"]})  # fmt: skip
    assert got["read"] == [str(data), str(secret), str(site / "private")]
    assert (got["write"], got["connect"], got["find"]) == ([], [], [])
    assert got["processes"], "the thief finds what there is to find"
    said = podman.execute("archipelago-north-worker", ["silo", "status", str(site)]).decode()
    assert said.startswith("north: ")
