"""Builds a folder from which a site without a network installs Archipelago: wheels, and a lock with the hash of each.

    python -m tools.wheelhouse FOLDER [--cuda]

The lock names the distributions that Archipelago needs at work, with the extras `images` and `text`, in the versions
and with the hashes of the project's own locks; development tools stay out. pip downloads them and checks their hashes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ddm.protocol.base import sha256_hex
from ddm.system.version import DISTRIBUTION

ROOT = Path(__file__).parent.parent
EXTRAS = ("images", "text", "diffusers")
LOCK = "requirements.lock"
_HEADING = f"""\
# Archipelago and all that it needs, with hashes. Install without a network:
# pip install --no-index --find-links . --require-hashes -r {LOCK}
"""


def blocks(lock: str) -> dict[str, str]:
    """Return the requirements of a lock, each with its hashes, by canonical name."""
    parts = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return {canonicalize_name(re.split(r"[=\s]", part)[0]): part for part in parts if "==" in part}


def needed(name: str, extras: Iterable[str]) -> set[str]:
    """Return the canonical names of all distributions that an installed one needs, as their metadata tell."""
    found: set[tuple[str, frozenset[str]]] = set()
    pending: list[tuple[str, frozenset[str]]] = [(canonicalize_name(name), frozenset(extras))]
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending += _requirements(*each)
    return {str(each) for each, _ in found} - {canonicalize_name(name)}


def _requirements(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    try:
        declared = distribution(name).requires or []
    except PackageNotFoundError:
        return  # of another system or another Python
    for text in declared:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def chosen_lock(*, cuda: bool) -> str:
    """Return the part of the project's locks that Archipelago needs at work."""
    known = blocks((ROOT / "requirements.lock").read_text("utf-8"))
    torch = blocks((ROOT / ("torch.lock" if cuda else "torch-cpu.lock")).read_text("utf-8"))
    names = needed(DISTRIBUTION, EXTRAS) - torch.keys()
    if missing := names - known.keys():
        sys.exit(f"No lock names {', '.join(sorted(missing))}; run `make lock` first.")
    return "".join([*(known[each] for each in sorted(names)), *torch.values()])


def build_wheel(folder: Path) -> Path:
    """Build Archipelago's own wheel, with the times of the last commit, so that anybody builds the same bytes."""
    command = ["git", "log", "-1", "--format=%ct"]
    told = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    environment = {"SOURCE_DATE_EPOCH": told or "0"} | os.environ
    hatch = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(folder),
    ]
    subprocess.run(hatch, cwd=ROOT, env=environment, stdout=sys.stderr, check=True)
    # In the name of a wheel a distribution has underscores.
    (wheel,) = folder.glob(f"{DISTRIBUTION.replace('-', '_')}-*.whl")
    return wheel


def build(folder: Path, *, cuda: bool) -> None:
    """Fill a folder: the wheels first, and last the lock that makes it complete."""
    lock = chosen_lock(cuda=cuda)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(lock)
        wanted.flush()
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run(
            [*pip, "--require-hashes", "--only-binary", ":all:", "-r", wanted.name, "-d", folder],
            check=True,
        )
    wheel = build_wheel(folder)
    version = wheel.name.split("-")[1]
    own = f"{DISTRIBUTION}[{','.join(EXTRAS)}]=={version} \\\n    --hash=sha256:{sha256_hex(wheel.read_bytes())}\n"
    (folder / LOCK).write_text(_HEADING + own + lock, "utf-8")


def main() -> None:
    """Build a wheelhouse."""
    parser = argparse.ArgumentParser(
        description="Build a folder that installs Archipelago without a network."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cuda", action="store_true", help="torch with CUDA, in place of its CPU build"
    )
    words = parser.parse_args()
    build(words.folder, cuda=words.cuda)
    wheels = list(words.folder.glob("*.whl"))
    total = sum(each.stat().st_size for each in wheels)
    print(f"{len(wheels)} wheels, {total / 1e6:.0f} MB in {words.folder}")


if __name__ == "__main__":
    main()
