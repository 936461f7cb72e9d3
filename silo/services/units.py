"""Which files make a site's worker and courier services: what each half sees, and the commands that start them."""

from dataclasses import dataclass
from pathlib import Path

from ddm.errors import SetupError
from ddm.services.places import hidden_by_systemd, installed, needs_person, require_passphrase_file
from ddm.services.quoting import mount
from ddm.services.rendering import render
from silo.config import SiloSettings, Site

_TABLES = (".csv", ".tsv", ".parquet")  # whose paths lead to images beside them
ENVIRONMENTS = Path("/etc/archipelago")


@dataclass(frozen=True)
class Places:
    """Everything of a machine that a site's services touch, as absolute paths without links.

    Attributes:
        site: the site's folder.
        data: its images; the folder of a table of paths.
        passphrase_file: opens the signing key.
        text_encoder: a folder for the worker to read, if plans with texts may come.
        ledger: the folder of its privacy ledger.
        anchor: keeps the ledger's head, if the site has one.
        jobs: the folder of its jobs on other machines, if the site names one.
    """

    site: Site
    data: Path
    passphrase_file: Path
    text_encoder: Path | None
    ledger: Path
    anchor: Path | None
    jobs: Path | None

    @classmethod
    def of(cls, site: Site, settings: SiloSettings) -> "Places":
        """Read them from a site's configuration.

        Raises:
            SetupError: no passphrase file is named, or the images or another of these places lie around the site or
                inside it where the courier looks, so that no mount could keep the courier from them.
        """
        folder = site.path.resolve()
        found = Site(folder)
        data = Path(settings.data).resolve()
        data = data.parent if data.suffix.lower() in _TABLES else data
        passphrase_file = require_passphrase_file(
            settings.passphrase_file, str(site.path / "silo.toml")
        ).resolve()
        ledger = found.ledger_folder_in(settings).resolve()
        anchor = path.resolve() if (path := found.anchor_path_in(settings)) else None
        jobs = settings.training.jobs.resolve() if settings.training.jobs else None
        apart = {"images": data, "passphrase file": passphrase_file, "ledger": ledger}
        apart |= {"anchor": anchor.parent} if anchor else {}
        apart |= {"folder of jobs": jobs} if jobs else {}
        for what, kept in apart.items():
            shared = [found.courier, found.inbox, found.outbox]
            if kept in (folder, *folder.parents) or any(
                each in (kept, *kept.parents) for each in shared
            ):
                remedy = f"Move the {what} or the site, and name the new place in silo.toml."
                expected = f"{what} apart from {folder}, or in its private/"
                raise SetupError(
                    str(kept), expected=expected, got="what the courier must see too", remedy=remedy
                )
        encoder = Path(settings.text.encoder).resolve() if settings.text else None
        return cls(found, data, passphrase_file, encoder, ledger, anchor, jobs)

    @property
    def configuration(self) -> tuple[Path, Path]:
        """What both halves read."""
        return self.site.path / "silo.toml", self.site.path / "policy.toml"

    @property
    def worker_reads(self) -> tuple[Path, ...]:
        """What the worker reads, apart from what it writes."""
        found = (*self.configuration, self.site.inbox, self.data, self.passphrase_file)
        return (*found, self.text_encoder) if self.text_encoder else found

    @property
    def worker_writes(self) -> tuple[Path, ...]:
        """What the worker writes."""
        return self.site.private, self.site.outbox, *self.elsewhere

    @property
    def elsewhere(self) -> tuple[Path, ...]:
        """What the worker alone writes outside its private folder."""
        wanted = (self.ledger, self.anchor and self.anchor.parent, self.jobs)
        return tuple(
            dict.fromkeys(
                each for each in wanted if each and self.site.private not in (each, *each.parents)
            )
        )

    @property
    def courier_reads(self) -> tuple[Path, ...]:
        """What the courier reads, apart from what it writes."""
        return *self.configuration, self.site.outbox

    @property
    def courier_writes(self) -> tuple[Path, ...]:
        """What the courier writes."""
        return self.site.courier, self.site.inbox


@dataclass(frozen=True)
class Names:
    """The users of a site's services; by default the silo's name makes them its own."""

    worker: str
    courier: str
    group: str


def as_users(site: Site, names: Names) -> dict[str, str]:
    """Return the files of two services of two users.

    Raises:
        SetupError: see `Places.of`; or a path cannot be quoted.
    """
    settings = site.settings()
    places, (silo, roots) = Places.of(site, settings), installed("silo")
    common = {"silo": settings.silo_id, "needs_person": needs_person()}
    files = {}
    for half, reads, writes in (
        ("worker", places.worker_reads, places.worker_writes),
        ("courier", places.courier_reads, places.courier_writes),
    ):
        hidden = [
            f"-{each}"
            for each in (
                places.site.private,
                places.data,
                places.passphrase_file,
                *places.elsewhere,
            )
        ]
        files[f"{_unit(settings, half)}.service"] = render(
            "silo",
            f"{half}.service.jinja",
            **common,
            **{half: getattr(names, half)},
            command=_command(silo, places.site, half),
            readable=hidden_by_systemd((*reads, *roots)),
            writable=writes,
            at_home=hidden_by_systemd(writes),
            hidden=f"-{places.site.courier}" if half == "worker" else hidden,
            environment=ENVIRONMENTS / f"{_unit(settings, 'courier')}.env",
            cpu_only=settings.training.device == "cpu",
        )
    files["prepare.sh"] = render(
        "silo",
        "prepare-users.sh.jinja",
        group=names.group,
        worker=names.worker,
        courier=names.courier,
        site=places.site.path,
        passphrase_file=places.passphrase_file,
        program=silo,
        data=places.data,
        ledger=places.ledger,
        anchor=places.anchor,
        elsewhere=places.elsewhere,
        closed=[
            each
            for each in (places.ledger, places.anchor, places.jobs)
            if each and each != places.site.private
        ],
    )
    return files


def as_containers(site: Site, image: str, podman: Path) -> dict[str, str]:
    """Return the files of two services of one ordinary user, each a rootless container.

    Raises:
        SetupError: see `Places.of`; or a path cannot be quoted, or not be mounted.
    """
    settings = site.settings()
    places = Places.of(site, settings)
    halves = {
        "worker": (places.worker_reads, places.worker_writes, ["--network=none", "--shm-size=1g"]),
        "courier": (
            places.courier_reads,
            places.courier_writes,
            [f"--env={name}" for name in _PROXY],
        ),
    }
    files = {"Containerfile": render("silo", "Containerfile.jinja", image=image)}
    for half, (reads, writes, own) in halves.items():
        unit = _unit(settings, half)
        mounts = [mount(each) for each in reads] + [mount(each, writable=True) for each in writes]
        if half == "worker" and settings.training.device != "cpu":
            own = (
                [*own, "--device=nvidia.com/gpu=all"] if settings.training.device == "cuda" else own
            )
        options = ["--rm", "--replace", f"--name={unit}", "--pull=never", "--log-driver=none", "--read-only",
                   "--cap-drop=all", "--security-opt=no-new-privileges", "--env=HOME=/tmp"]  # fmt: skip
        command = [
            podman,
            "run",
            *options,
            *own,
            *mounts,
            image,
            *_command("silo", places.site, half),
        ]
        files[f"{unit}.service"] = render(
            "silo",
            "container.service.jinja",
            silo=settings.silo_id,
            half=half,
            command=command,
            stop=[podman, "stop", "--ignore", "--time=45", unit],
            environment=f"{unit}.env" if half == "courier" else None,
            needs_person=needs_person(),
        )
    return files


_PROXY = ("https_proxy", "no_proxy")


def _unit(settings: SiloSettings, half: str) -> str:
    return f"archipelago-{settings.silo_id}-{half}"


def _command(silo: str | Path, site: Site, half: str) -> list[object]:
    return [silo, "run", site.path, "--only", half]
