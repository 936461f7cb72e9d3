"""The folders of a site's jobs: where they are, and their end where nobody wants the expert any more."""

from collections.abc import Iterator
from pathlib import Path

from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder, Launch, discard_job, read_document
from silo.config import Site


def jobs_of(settings: TrainingSettings, silo_id: str) -> Path | None:
    """Return the folder of this silo's jobs that other machines see; None where jobs lie with the plan's work."""
    return settings.jobs / silo_id if settings.jobs else None


def end_jobs(site: Site, plan_id: str) -> None:
    """Let the processes of a plan's jobs end wherever they run, and remove the images that were copied for them."""
    settings = site.settings()
    shared = jobs_of(settings.training, settings.silo_id)
    for folder in _folders(site.work_folder(plan_id) / "experts", "*/training"):
        if (launch := read_document(Launch, folder.launch)) and launch.by == "command":
            folder.run(launch.launch_id).path.mkdir(parents=True, exist_ok=True)
            folder.run(launch.launch_id).stop.touch()
    for folder in _folders(shared / plan_id, "*") if shared else ():
        discard_job(folder)


def discard_others(jobs: Path, plan_id: str) -> None:
    """Remove the jobs of other plans, whose processes then end; nobody follows them any more."""
    for plan in jobs.iterdir() if jobs.is_dir() else ():
        if plan.name != plan_id and plan.is_dir() and not plan.is_symlink():
            for folder in _folders(plan, "*"):
                discard_job(folder)


def _folders(within: Path, pattern: str) -> Iterator[JobFolder]:
    yield from (
        JobFolder(path)
        for path in sorted(within.glob(pattern))
        if path.is_dir() and not path.is_symlink()
    )
