"""Wheel and sdist: what is in them, that anybody builds the same bytes, and that the wheel works without the tree."""

import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.installed import build, install

ROOT = Path(__file__).parent.parent
PACKAGES = ("ddm", "silo", "aggregator")
EPOCH = "1790000000"
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")

pytestmark = pytest.mark.slow


def files_of_sdist(sdist: Path) -> dict[str, bytes]:
    """The files of an sdist by their path below its one folder."""
    with tarfile.open(sdist) as archive:
        members = {
            member.name.partition("/")[2]: archive.extractfile(member)
            for member in archive
            if member.isfile()
        }
        return {name: stream.read() for name, stream in members.items() if stream}


def files_of_wheel(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by their path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tracked(*folders: str) -> dict[str, bytes]:
    """The files that git knows or would add, without those deleted, by their path."""
    command = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *folders,
    ]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return {
        name: (ROOT / name).read_bytes() for name in listed.split("\0") if (ROOT / name).is_file()
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist") / "out", EPOCH)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel") / "out", EPOCH)


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the sdist, at another place than this one."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    files = files_of_wheel(wheel)
    metadata = {name for name in files if name.split("/")[0].endswith(".dist-info")}
    assert {name: files[name] for name in files if name not in metadata} == tracked(*PACKAGES)
    assert {name.partition("/")[2] for name in metadata} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    for needed in (
        "ddm/py.typed",
        "ddm/pages/templates/report.html.jinja",
        "silo/client_app.py",
    ):
        assert needed in files
    assert "aggregator/runtime/flower_app/pyproject.toml" in files
    for templates in ("silo/services", "aggregator/services", "ddm/services"):
        assert any(
            name.startswith(f"{templates}/templates/") and name.endswith(".jinja") for name in files
        ), templates


def test_sdist_holds_every_file_of_the_tree_and_no_other(sdist: Path) -> None:
    files = files_of_sdist(sdist)
    del files["PKG-INFO"]
    assert files == tracked()


def test_wheel_of_the_sdist_is_that_of_the_tree_to_the_byte(
    wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    again = build("wheel", unpacked, tmp_path / "out", EPOCH, umask=0o077)
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_sdist_is_the_same_bytes_again(sdist: Path, tmp_path: Path) -> None:
    assert (
        build("sdist", ROOT, tmp_path / "out", EPOCH, umask=0o077).read_bytes()
        == sdist.read_bytes()
    )


def test_control_another_time_of_the_source_gives_other_bytes(wheel: Path, tmp_path: Path) -> None:
    later = build("wheel", ROOT, tmp_path / "out", str(int(EPOCH) + 60))
    assert later.read_bytes() != wheel.read_bytes()
    assert files_of_wheel(later) == files_of_wheel(wheel)


@pytest.fixture(scope="module")
def installed(wheel: Path, unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples of the sdist and an environment `.venv`: the wheel, and what it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(unpacked / "examples", folder / "examples")
    install(wheel, folder)
    return folder


def bash(folder: Path, script: str, extra: Mapping[str, str] | None = None) -> str:
    """Run a script in a folder, with nothing of this process's environment that leads back to the tree."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        **(extra or {}),
    }
    command = ["bash", "-euo", "pipefail", "-c", script]
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("program", PACKAGES)
def test_installed_wheel_has_its_program_and_nothing_of_the_tree(
    program: str, installed: Path
) -> None:
    assert f"Usage: {program}" in bash(installed, f".venv/bin/{program} --help")
    place = bash(
        installed, f".venv/bin/python -P -c 'import {program}; print({program}.__file__)'"
    ).strip()
    assert Path(place).is_relative_to(installed / ".venv")
    assert not Path(place).is_relative_to(ROOT)


def typed(heading: str) -> str:
    """The commands that a section of the tutorial has the reader type, as one script."""
    text = TUTORIAL.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, heading
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    return "\n".join(re.sub(r"^[$>] ", "", line) for block in blocks for line in block.split("\n"))


def unattended(script: str) -> str:
    """Give commands the answers that a person at a terminal would type."""
    # The digest of the whole invitation stands for the six words of its code.
    code = "$(sha256sum < $D/fed/invitation.json | cut -d' ' -f1)"
    script = script.replace("silo join ", f'silo join --yes --code "{code}" ')
    return script.replace("aggregator enroll ", "aggregator enroll --yes ")


@pytest.mark.timeout(1200)
def test_first_steps_of_the_tutorial_work_as_typed_beside_the_installed_wheel(
    installed: Path,
) -> None:
    setup = typed("1. Repository and data").splitlines()
    make_data = "python examples/digits_three_silos/make_data.py --out build/tutorial/data"
    # Beside a wheel there is no Makefile, and the tutorial names this command.
    assert make_data in " ".join(TUTORIAL.split())
    script = "\n".join(
        [
            *(line for line in setup if line.startswith("export ")),
            make_data,
            *(typed(heading) for heading in ("2. A federation", "3. Three sites", "4. A plan")),
        ]
    )
    said = bash(installed, unattended(script))
    assert "Signed plan digits-" in said
    fed = installed / "build" / "tutorial" / "fed"
    assert {card.name.partition(".")[0] for card in (fed / "registry").glob("*.json")} >= {
        "north",
        "east",
        "west",
    }
    opened = bash(installed, f".venv/bin/aggregator status {shlex.quote(str(fed))}")
    assert "not seen yet" in opened
