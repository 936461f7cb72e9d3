"""The command that `[training] launcher` names: facts about it, and the rule over these facts."""

import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import DiskError
from ddm.io.own_folder import find_danger
from ddm.io.space import check_writable
from ddm.system.findings import Finding
from ddm.training.config import TrainingSettings, filled

# Permissions of everybody but owner and group.
_OTHERS = 0o007


@dataclass(frozen=True)
class LauncherFacts:
    """What is known on this machine of the command that starts a job's processes.

    Attributes:
        missing: the programs of its words that are not found; behind `env` comes another one.
        jobs: the folder that every machine sees; None where jobs are in the site's own folder.
        fault: why nothing can be written there; None where it can, or where it is not there.
        danger: who else than the worker could put something in its place or into it; None for nobody.
        mode: its permission bits; None where it is not there.
    """

    missing: tuple[str, ...]
    jobs: Path | None = None
    fault: str | None = None
    danger: str | None = None
    mode: int | None = None


def find_launcher(settings: TrainingSettings, user: int) -> LauncherFacts | None:
    """Look for the launcher's program and folder; None where this machine trains by itself. Nothing is started.

    Args:
        settings: the site's.
        user: the number of the worker's user.
    """
    if settings.launcher == "local":
        return None
    words = filled(tuple(settings.launcher), {"python": sys.executable})
    missing = tuple(word for word in _programs(words) if shutil.which(word) is None)
    jobs = settings.jobs
    # A folder that is not there is a finding of its own, see `launcher_findings`: nothing is created by a check.
    if jobs is None or not jobs.exists():
        return LauncherFacts(missing, jobs)
    # Writing is tried: on a folder of other machines, permission bits alone decide nothing.
    fault = None
    try:
        check_writable([jobs])
    except DiskError as error:
        fault = error.got
    danger = find_danger(jobs, user)
    return LauncherFacts(missing, jobs, fault, danger, stat.S_IMODE(jobs.stat().st_mode))


def _programs(words: Sequence[str]) -> Iterator[str]:
    """Yield the command's program, and the one that `env NAME=VALUE ...` starts."""
    yield words[0]
    # A launcher often sets variables: `env NAME=VALUE srun ...`. Then `env` is found, and says nothing about srun.
    if Path(words[0]).name != "env":
        return
    for word in words[1:]:
        if "=" not in word and not word.startswith("-"):
            yield word
            return


def launcher_findings(launcher: LauncherFacts | None) -> Iterator[Finding]:
    """Report what would keep a job from starting, or show others the images that are copied for it."""
    if launcher is None:
        return
    for name in launcher.missing:
        yield Finding(
            "training.launcher",
            expected="a program on this machine",
            got=f"{name}, which is not found",
            remedy="Install it, or give its whole path in silo.toml; the worker's service has a PATH of its own.",
        )
    jobs = launcher.jobs
    if jobs is None:
        return
    # A warning: the folder may be mounted by the time the worker needs it.
    if launcher.mode is None:
        yield Finding(
            str(jobs),
            expected="the folder training.jobs, which every machine sees",
            got="no such folder; the worker would make it, and other machines may not see it",
            remedy=f"Mount it, or make it where every machine of the job sees it: mkdir -m 700 {jobs}",
            level="warn",
        )
    elif launcher.fault is not None:
        yield Finding(
            str(jobs),
            expected="the folder training.jobs, in which the worker can write",
            got=launcher.fault,
            remedy="Let the worker's user write there, or set training.jobs in silo.toml to where it may.",
        )
    elif launcher.danger is not None:
        yield Finding(
            str(jobs),
            expected="a folder in which only the worker's user can write, since jobs trust its content",
            got=launcher.danger,
            remedy="Take the folder that is named from others (chown, chmod go-w), or set training.jobs in silo.toml "
            "to another place.",
        )
    elif launcher.mode & _OTHERS:
        yield Finding(
            str(jobs),
            expected="closed to others: images are copied there while a job trains",
            got=f"mode {launcher.mode:03o}",
            remedy=f"chmod o= {jobs}, or set training.jobs in silo.toml to a folder of the worker below it.",
            level="warn",
        )
