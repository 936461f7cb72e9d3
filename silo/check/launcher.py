"""The launcher that `[training] launcher` names: what is found of it, and the rule over that."""

import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import DiskError
from ddm.io.space import check_writable
from ddm.system.findings import Finding
from ddm.training.config import TrainingSettings, filled

_OTHERS = 0o007


@dataclass(frozen=True)
class LauncherFacts:
    """What this machine tells of the command that starts a job's processes.

    Attributes:
        missing: the programs of its words that are not found; behind `env` comes another one.
        jobs: the folder that every machine sees; None where jobs lie in the site's own folder.
        fault: why nothing can be written there; None where it can, or where it is not there.
        mode: its permission bits; None where it is not there.
    """

    missing: tuple[str, ...]
    jobs: Path | None = None
    fault: str | None = None
    mode: int | None = None


def find_launcher(settings: TrainingSettings) -> LauncherFacts | None:
    """Look for the launcher's program and folder; None where this machine trains by itself. Nothing is started."""
    if settings.launcher == "local":
        return None
    words = filled(tuple(settings.launcher), {"python": sys.executable})
    missing = tuple(word for word in _programs(words) if shutil.which(word) is None)
    if (jobs := settings.jobs) is None or not jobs.exists():
        return LauncherFacts(missing, jobs)
    try:
        check_writable([jobs])
        fault = None
    except DiskError as error:
        fault = error.got
    return LauncherFacts(missing, jobs, fault, stat.S_IMODE(jobs.stat().st_mode))


def _programs(words: Sequence[str]) -> Iterator[str]:
    """Yield the command's program, and the one that `env NAME=VALUE ...` starts."""
    yield words[0]
    if Path(words[0]).name == "env":
        yield from [word for word in words[1:] if "=" not in word and not word.startswith("-")][:1]


def launcher_findings(found: LauncherFacts | None) -> Iterator[Finding]:
    """Report what would keep a job from starting, or show others the images that are copied for it."""
    if found is None:
        return
    for name in found.missing:
        remedy = "Install it, or give its whole path in silo.toml; the worker's service has a PATH of its own."
        yield Finding(
            "training.launcher", "a program on this machine", f"{name}, which is not found", remedy
        )
    if (jobs := found.jobs) is None:
        return
    if found.mode is None:
        remedy = f"Mount it, or make it where every machine of the job sees it: mkdir -m 700 {jobs}"
        got = "nothing there; the worker would make it, and other machines may not see it"
        yield Finding(
            str(jobs), "the folder training.jobs, which every machine sees", got, remedy, "warn"
        )
    elif found.fault is not None:
        remedy = (
            "Let the worker's user write there, or set training.jobs in silo.toml to where it may."
        )
        yield Finding(
            str(jobs),
            "the folder training.jobs, in which the worker can write",
            found.fault,
            remedy,
        )
    elif found.mode & _OTHERS:
        remedy = f"chmod o= {jobs}, or let training.jobs in silo.toml name a folder of the worker's own below it."
        got = f"mode {found.mode:03o}"
        yield Finding(
            str(jobs),
            "closed to others: images are copied there while a job trains",
            got,
            remedy,
            "warn",
        )
