"""The wheelhouse: installs without a network by hashes alone, refuses another byte, and uninstalls without a trace."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installed import ROOT, install_wheelhouse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PACKAGES = ("ddm", "silo", "aggregator")
PROGRAMS = ("silo", "aggregator", "ddm")


def test_wheelhouse_holds_what_its_lock_names_and_no_development_tool(wheelhouse: Path) -> None:
    lock = (wheelhouse / "requirements.lock").read_text("utf-8")
    named = {line.split("==")[0].split("[")[0] for line in lock.splitlines() if "==" in line}
    held = {
        wheel.name.split("-")[0].lower().replace("_", "-") for wheel in wheelhouse.glob("*.whl")
    }
    assert {name.lower().replace("_", "-").replace(".", "-") for name in named} >= held
    assert {"archipelago-ddm", "torch", "flwr", "pydicom", "transformers", "diffusers"} <= held
    assert not held & {"pytest", "ruff", "mypy", "selenium", "hypothesis"}
    assert {path.suffix for path in wheelhouse.iterdir()} == {".whl", ".lock"}


def test_wheelhouse_installs_without_a_network_and_uninstalls_without_a_trace(
    wheelhouse: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    result = install_wheelhouse(wheelhouse, environment)
    assert result.returncode == 0, result.stdout + result.stderr
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    subprocess.run([*pip, "check"], check=True, capture_output=True)
    for name in PROGRAMS:
        said = subprocess.run(
            [environment / "bin" / name, "--help"],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
        )
        assert f"Usage: {name}" in said.stdout
    (packages,) = (environment / "lib").glob("python*/site-packages")
    assert all((packages / name).is_dir() for name in PACKAGES)
    bill = tmp_path / "sbom.json"
    words = [
        "environment",
        environment / "bin" / "python",
        "--spec-version",
        "1.6",
        "--validate",
        "-o",
        bill,
    ]
    subprocess.run(
        [Path(sys.executable).with_name("cyclonedx-py"), *map(str, words)],
        check=True,
        capture_output=True,
    )
    listed = {
        component["name"].lower() for component in json.loads(bill.read_text("utf-8"))["components"]
    }
    assert {"archipelago-ddm", "torch", "flwr"} <= listed and "pytest" not in listed
    site = tmp_path / "site"
    site.mkdir()
    (site / "silo.toml").write_text("kept")
    subprocess.run(
        [*pip, "uninstall", "--yes", "archipelago-ddm"], check=True, capture_output=True, cwd=site
    )
    left = [path for name in PACKAGES for path in packages.glob(f"{name}*")] + list(
        packages.glob("archipelago*")
    )
    assert not [
        path
        for path in left
        if path.suffix != ".pth" and path.name.split(".")[0] in (*PACKAGES, "archipelago")
    ]
    assert not [name for name in PROGRAMS if (environment / "bin" / name).exists()]
    assert (site / "silo.toml").read_text() == "kept"


def test_wheelhouse_with_another_byte_is_refused(wheelhouse: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(wheelhouse, tmp_path / "copy"))
    (wheel,) = copy.glob("tuf-*.whl")
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(bytes(data))
    result = install_wheelhouse(copy, tmp_path / "environment")
    assert result.returncode != 0 and "HASHES" in result.stderr and "tuf" in result.stderr


def test_makefile_fills_it_in_build() -> None:
    said = subprocess.run(
        ["make", "-n", "wheelhouse"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "tools.wheelhouse build/wheelhouse" in said
