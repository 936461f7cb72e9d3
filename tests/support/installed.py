"""Builds of this tree: wheel and sdist, the wheelhouse, and environments that hold nothing else."""

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(target: str, tree: Path, out: Path, epoch: str, umask: int = 0o022) -> Path:
    """Build the wheel or the sdist of a tree, as `uv build` does but with the installed hatchling, offline."""
    out.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        str(out),
    ]
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    result = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.iterdir()
    return built


def install(wheel: Path, folder: Path) -> None:
    """Install a wheel into a new environment `.venv` of a folder.

    The dependencies are those of this environment, by a path that Python adds; its editable install, which Python finds
    by a file of the same kind, is not followed.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], timeout=120, check=True
    )
    own = folder / ".venv" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(own),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run(
        [*pip, "--no-compile", "--disable-pip-version-check", wheel], timeout=300, check=True
    )
    (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n", "utf-8")


def python_for_everyone() -> Path | None:
    """An interpreter of this version that other users of the machine may execute, too."""
    number = f"{sys.version_info.major}.{sys.version_info.minor}"
    mine = Path(sys.executable).resolve()
    for python in (mine, Path(f"/usr/local/bin/python{number}"), Path(f"/usr/bin/python{number}")):
        if python.exists():
            command = ["runuser", "-u", "nobody", "--", python, "-c", "import venv"]
            if subprocess.run(command, check=False, capture_output=True, cwd="/").returncode == 0:
                return python
    return None


def fill_wheelhouse(folder: Path) -> Path:
    """Fill a folder as `make wheelhouse` does; skips the test where no package index answers."""
    command = [sys.executable, "-m", "tools.wheelhouse", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if "No matching distribution" in result.stderr or "Connection" in result.stderr:
        pytest.skip(f"no package index: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def install_wheelhouse(
    wheelhouse: Path, environment: Path, python: Path | str = sys.executable
) -> "subprocess.CompletedProcess[str]":
    """Install what a wheelhouse holds into a new environment, as the documentation has it, without a network."""
    subprocess.run([python, "-m", "venv", "--without-pip", environment], timeout=120, check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "install",
        "--quiet",
    ]
    words = ["--no-index", "--find-links", ".", "--require-hashes", "-r", "requirements.lock"]
    command = [*pip, *words]
    if os.geteuid() == 0:
        # Only root may take the network away.
        command = ["unshare", "--net", *command]
    # Nothing of this machine's settings of pip, which may name an index.
    empty = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "HOME": str(environment)}
    return subprocess.run(
        command, cwd=wheelhouse, env=empty, capture_output=True, text=True, timeout=900, check=False
    )
