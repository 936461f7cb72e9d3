"""The units of a site: what each half sees, under paths as people have them; and what cannot be kept apart."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from silo.config import Site
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, TinyFederation
from tests.support.services import UnitFile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """A site in a folder with blanks, an umlaut, a percent and a dollar sign."""
    made = TinyFederation.create(
        tmp_path_factory.mktemp("services") / "Klinik Süd 50% $x", {"north": 20}
    )
    (made.path / "pass wort").write_bytes(PASSPHRASE + b"\n")
    for settings in (
        made.sites["north"].path / "silo.toml",
        made.federation.path / "federation.toml",
    ):
        name_passphrase(settings, made.path / "pass wort")
    return made


def name_passphrase(settings: Path, passphrase: Path) -> None:
    lines = settings.read_text("utf-8").splitlines()
    settings.write_text(
        "\n".join([lines[0], f'passphrase_file = "{passphrase}"', *lines[1:]]) + "\n", "utf-8"
    )


def written(tiny: TinyFederation, out: Path, *words: object) -> tuple[UnitFile, UnitFile]:
    result = run_command("silo", "service", tiny.sites["north"].path, "--out", out, *words)
    assert result.code == 0, result.err
    worker, courier = (
        UnitFile.read(out / f"archipelago-north-{half}.service") for half in ("worker", "courier")
    )
    return worker, courier


def test_units_keep_the_worker_from_the_network_and_the_courier_from_the_data(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    site = tiny.sites["north"]
    data = tiny.path / "north.npz"
    secret = tiny.path / "pass wort"
    worker, courier = written(tiny, tmp_path / "out")
    for half, unit in (("worker", worker), ("courier", courier)):
        with case(half=half):
            program, *words = unit.command()
            assert words == ["run", str(site.path), "--only", half] and os.access(program, os.X_OK)
            assert unit.settings["User"] == [f"silo-north-{half}"]
            assert unit.settings["ProtectSystem"] == ["strict"] and unit.settings[
                "NoNewPrivileges"
            ] == ["yes"]
            assert unit.settings["CapabilityBoundingSet"] == [""]
    assert worker.settings["PrivateNetwork"] == ["yes"] and worker.settings["IPAddressDeny"] == [
        "any"
    ]
    assert worker.words("ReadWritePaths") == [str(site.private), str(site.outbox)]
    assert worker.words("InaccessiblePaths") == [f"-{site.courier}"]
    assert "PrivateNetwork" not in courier.settings
    assert courier.words("ReadWritePaths") == [str(site.courier), str(site.inbox)]
    assert courier.words("InaccessiblePaths") == [
        f"-{path}" for path in (site.private, data, secret)
    ]
    assert not {str(data), str(secret), str(site.private)} & set(courier.words("BindReadOnlyPaths"))


def test_containers_mount_what_each_half_needs_and_nothing_else(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    site = tiny.sites["north"]
    data = tiny.path / "north.npz"
    secret = tiny.path / "pass wort"
    worker, courier = (
        unit.command() for unit in written(tiny, tmp_path / "out", "--kind", "containers")
    )

    def mounts(words: list[str]) -> dict[str, bool]:
        is_readonly = {}
        for word in words:
            if word.startswith("--mount="):
                kind, src, dst, readonly = (part.partition("=")[2] for part in word[8:].split(","))
                assert kind == "bind" and src == dst
                is_readonly[src] = readonly == "true"
        assert len(is_readonly) == sum(
            word.startswith(("--mount", "-v", "--volume")) for word in words
        )
        return is_readonly

    both = {str(site.path / "silo.toml"): True, str(site.path / "policy.toml"): True}
    assert mounts(worker) == both | {str(data): True, str(secret): True, str(site.inbox): True} | {
        str(site.private): False, str(site.outbox): False}  # fmt: skip
    assert mounts(courier) == both | {
        str(site.outbox): True,
        str(site.courier): False,
        str(site.inbox): False,
    }
    assert "--network=none" in worker and not any("network" in word for word in courier)
    for words in (worker, courier):
        assert {
            "--cap-drop=all",
            "--read-only",
            "--security-opt=no-new-privileges",
            "--pull=never",
        } <= set(words)
    containerfile = (tmp_path / "out" / "Containerfile").read_text()
    assert "--require-hashes" in containerfile
    require_digest(containerfile)


def require_digest(containerfile: str) -> None:
    """Build no further than the step that looks at the name of the base image, as podman would run it."""
    lines = containerfile.splitlines()
    place = lines.index("FROM ${BASE}")
    assert lines[place - 1] == "ARG BASE", (
        "there is no default, under whose tag other bytes may be given"
    )
    step = lines[place + 2].removeprefix("RUN ")
    images = {"python:3.11": 1, "python@sha256:" + "0" * 64: 0, "": 1}
    for image, code in images.items():
        finished = subprocess.run(
            ["sh", "-c", step], env={"BASE": image}, capture_output=True, check=False
        )
        assert finished.returncode == code, image


def test_table_of_paths_is_given_to_the_worker_with_the_images_beside_it(
    tmp_path: Path, tiny: TinyFederation
) -> None:
    site = Site(shutil.copytree(tiny.sites["north"].path, tmp_path / "site"))
    (tmp_path / "export").mkdir()
    change(site, str(tiny.path / "north.npz"), str(tmp_path / "export" / "images.csv"))
    assert run_command("silo", "service", site.path, "--out", tmp_path / "out").code == 0
    courier = UnitFile.read(tmp_path / "out" / "archipelago-north-courier.service")
    assert f"-{tmp_path / 'export'}" in courier.words("InaccessiblePaths")


def change(site: Site, old: str, new: str) -> None:
    path = site.path / "silo.toml"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def test_ledger_anchor_and_jobs_elsewhere_are_the_workers_to_write_and_hidden_from_the_courier(
    tmp_path: Path, tiny: TinyFederation
) -> None:
    site = Site(shutil.copytree(tiny.sites["north"].path, tmp_path / "site"))
    folders = [tmp_path / name for name in ("the ledger", "disk", "jobs")]
    for folder in folders:
        folder.mkdir()
    ledger, disk, jobs = map(str, folders)
    anchor = f"{disk}/north.anchor"
    change(site, "[ledger]", f'[ledger]\nfolder = "{ledger}"\nanchor = "{anchor}"')
    change(site, 'launcher = "local"', f'launcher = ["srun", "{{folder}}"]\njobs = "{jobs}"')
    for kind in ("systemd", "containers"):
        assert (
            run_command("silo", "service", site.path, "--out", tmp_path / kind, "--kind", kind).code
            == 0
        )
    worker, courier = (UnitFile.read(tmp_path / "systemd" / f"archipelago-north-{half}.service") for half in
                       ("worker", "courier"))  # fmt: skip
    assert worker.words("ReadWritePaths") == [
        str(site.private),
        str(site.outbox),
        ledger,
        disk,
        jobs,
    ]
    assert courier.words("InaccessiblePaths")[-3:] == [f"-{ledger}", f"-{disk}", f"-{jobs}"]
    mounted = {half: UnitFile.read(tmp_path / "containers" / f"archipelago-north-{half}.service").command()
               for half in ("worker", "courier")}  # fmt: skip
    for place in (ledger, disk, jobs):
        assert f"--mount=type=bind,src={place},dst={place},ro=false" in mounted["worker"]
        assert not any(place in word for word in mounted["courier"])
    script = tmp_path / "systemd" / "prepare.sh"
    subprocess.run(["sh", "-n", script], check=True)
    text = script.read_text("utf-8")
    assert f"chown -R \"$worker:\" '{ledger}'" in text and f"{anchor}.lock; do" in text
    assert (
        f"test -w {disk}\n" in text
        and f"test -r {jobs}\n" in text
        and f"test -r {anchor}\n" in text
    )
    change(site, f'"{anchor}"', f'"{site.path}/north.anchor"')
    result = run_command("silo", "service", site.path, "--out", tmp_path / "out")
    assert result.code == 3 and "Move the anchor" in result.err


@pytest.mark.parametrize("place", ["", "site", "site/outbox", "site/courier/images"])
def test_images_around_what_the_courier_sees_are_refused(
    place: str, tiny: TinyFederation, tmp_path: Path
) -> None:
    site = Site(shutil.copytree(tiny.sites["north"].path, tmp_path / "site"))
    change(site, str(tiny.path / "north.npz"), str(tmp_path / place).rstrip("/"))
    result = run_command("silo", "service", site.path, "--out", tmp_path / "out")
    assert result.code == 3 and "Move the images" in result.err
    assert not (tmp_path / "out").exists()
    change(site, str(tmp_path / place).rstrip("/") + '"', str(site.private / "images") + '"')
    assert run_command("silo", "service", site.path, "--out", tmp_path / "out").code == 0


def test_site_whose_passphrase_a_person_types_is_told_what_to_add_and_that_helps(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    site = Site(shutil.copytree(tiny.sites["north"].path, tmp_path / "site"))
    path = site.path / "silo.toml"
    path.write_text(
        "\n".join(line for line in path.read_text().splitlines() if "passphrase" not in line)
    )
    for kind in ("systemd", "containers"):
        result = run_command(
            "silo", "service", site.path, "--out", tmp_path / "out", "--kind", kind
        )
        assert result.code == 3 and "passphrase_file = " in result.err
    name_passphrase(path, tiny.path / "pass wort")
    assert run_command("silo", "service", site.path, "--out", tmp_path / "out").code == 0


def test_wrong_options_of_service_end_with_what_to_do(tiny: TinyFederation, tmp_path: Path) -> None:
    service = ("silo", "service", tiny.sites["north"].path, "--out", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").touch()
    assert run_command(*service, "--kind", "docker").code == 2
    assert run_command(*service, "--worker-user", "root; rm").code == 3
    assert run_command(*service, "--image", "x").code == 3
    assert run_command(*service, "--kind", "containers", "--group", "x").code == 3
    assert run_command(*service, "--kind", "containers", "--image", "A B").code == 3
    assert run_command("silo", "service", tmp_path, "--out", tmp_path / "out").code == 4
    assert (
        run_command("silo", "service", tiny.sites["north"].path, "--out", tmp_path / "full").code
        == 6
    )
    assert not (tmp_path / "out").exists()


def test_scripts_are_valid_shell_and_the_aggregator_has_its_unit(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    written(tiny, tmp_path / "out")
    fed = tiny.federation.path
    assert (
        run_command(
            "aggregator", "service", fed, "--out", tmp_path / "fed", "--user", "archipelago"
        ).code
        == 0
    )
    unit = UnitFile.read(tmp_path / "fed" / "archipelago-tiny-aggregator.service")
    assert unit.command()[1:] == ["run", str(fed)] and unit.words("ReadWritePaths") == [str(fed)]
    for script in (tmp_path / "out" / "prepare.sh", tmp_path / "fed" / "prepare.sh"):
        subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.slow
def test_systemd_finds_nothing_wrong_with_the_units_and_little_exposed(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    written(tiny, tmp_path / "users")
    written(tiny, tmp_path / "containers", "--kind", "containers")
    assert (
        run_command("aggregator", "service", tiny.federation.path, "--out", tmp_path / "fed").code
        == 0
    )
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}

    def analyze(*words: object) -> str:
        result = subprocess.run(["systemd-analyze", *map(str, words)], capture_output=True, text=True, check=False,
                              env=environment)  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    system = [*(tmp_path / "users").glob("*.service"), *(tmp_path / "fed").glob("*.service")]
    assert len(system) == 3
    assert not analyze("verify", *system)
    if Path("/usr/bin/podman").exists():
        said = analyze("verify", "--user", *(tmp_path / "containers").glob("*.service"))
        assert "archipelago" not in said, said
    for unit in system:
        exposed = float(
            analyze("security", "--offline=true", unit).split("exposure level for")[1].split()[1]
        )
        print(unit.name, exposed)
        assert exposed <= 2.0
    broken = tmp_path / "broken.service"
    broken.write_text(
        system[0].read_text("utf-8").replace("ProtectSystem=strict", "ProtectSystm=strict"), "utf-8"
    )
    assert (
        "ProtectSystm"
        in subprocess.run(
            ["systemd-analyze", "verify", broken], capture_output=True, text=True, check=False
        ).stderr
    )
