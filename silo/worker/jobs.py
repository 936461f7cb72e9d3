"""The folders of a site's jobs: where they are, and their end where nobody wants the expert any more."""

from collections.abc import Iterator
from pathlib import Path

from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder, Launch, discard_job, read_document
from silo.config import Site


def jobs_of(settings: TrainingSettings, silo_id: str) -> Path | None:
    """Return the folder of this silo's jobs that other machines see; None where jobs are in the plan's folder."""
    if settings.jobs is None:
        return None
    return settings.jobs / silo_id


def end_jobs(site: Site, plan_id: str) -> None:
    """Let the processes of a plan's jobs end wherever they run, and remove the images that were copied for them."""
    settings = site.settings()
    for folder in _job_folders(site.work_folder(plan_id) / "experts", "*/training"):
        launch = read_document(Launch, folder.launch)
        if launch is not None and launch.by == "command":
            # The processes look for this file, on whichever machine they run.
            # The worker may have no other way to reach them: a scheduler started them on machines of its own.
            folder.run(launch.launch_id).request_stop()
    shared_jobs = jobs_of(settings.training, settings.silo_id)
    if shared_jobs is not None:
        for folder in _job_folders(shared_jobs / plan_id, "*"):
            discard_job(folder)


def discard_others(jobs: Path, plan_id: str) -> None:
    """Remove the jobs of other plans, whose processes then end; nobody follows them any more."""
    if not jobs.is_dir():
        return
    for plan_folder in jobs.iterdir():
        if plan_folder.name != plan_id and plan_folder.is_dir() and not plan_folder.is_symlink():
            for folder in _job_folders(plan_folder, "*"):
                discard_job(folder)


def _job_folders(within: Path, pattern: str) -> Iterator[JobFolder]:
    for path in sorted(within.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            yield JobFolder(path)
