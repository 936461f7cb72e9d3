"""Which files make a site's worker and courier services: what each half sees, and the commands that start them."""

from dataclasses import dataclass
from pathlib import Path

from ddm.errors import SetupError
from ddm.services.quoting import mount
from ddm.services.units import Access, installed_program, render, require_passphrase_file
from silo.config import SiloSettings, Site

# Tables of paths, which lead to images beside them.
_TABLES = (".csv", ".tsv", ".parquet")
_ENVIRONMENTS = Path("/etc/archipelago")
_PROXY_VARIABLES = ("https_proxy", "no_proxy")
# No image is fetched, nothing but mounts can be written, and root inside has no capability.
_CONTAINER_OPTIONS = (
    *("--rm", "--replace", "--pull=never", "--log-driver=none", "--read-only", "--cap-drop=all"),
    *("--security-opt=no-new-privileges", "--env=HOME=/tmp"),
)


@dataclass(frozen=True)
class SitePaths:
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
    def of(cls, site: Site, settings: SiloSettings) -> "SitePaths":
        """Read them from a site's configuration.

        Raises:
            SetupError: no passphrase file is named, or the courier could not be kept from the images or another path.
        """
        resolved = Site(site.path.resolve())
        data = Path(settings.data).resolve()
        # The table alone would be visible to the service, and not the images that it names.
        if data.suffix.lower() in _TABLES:
            data = data.parent
        text_encoder = None
        if settings.text is not None:
            text_encoder = Path(settings.text.encoder).resolve()
        paths = cls(
            site=resolved,
            data=data,
            passphrase_file=require_passphrase_file(
                settings.passphrase_file, str(site.path / "silo.toml")
            ),
            text_encoder=text_encoder,
            ledger=resolved.ledger_folder_in(settings).resolve(),
            anchor=_resolved(resolved.anchor_path_in(settings)),
            jobs=_resolved(settings.training.jobs),
        )
        paths._require_apart()
        return paths

    def _require_apart(self) -> None:
        """Refuse paths around the site, or inside it where the courier looks: no mount could keep the courier away.

        Raises:
            SetupError: names the path.
        """
        apart: dict[str, Path | None] = {
            "images": self.data,
            "passphrase file": self.passphrase_file,
            "ledger": self.ledger,
            "anchor": self._anchor_folder,
            "folder of jobs": self.jobs,
        }
        folder = self.site.path
        seen_by_courier = (self.site.courier, self.site.inbox, self.site.outbox)
        for name, path in apart.items():
            if path is None:
                continue
            # A folder that contains the site, and one inside or around a folder that the courier is given.
            # Both directions count: a mount shows what is below it.
            is_around = folder.is_relative_to(path)
            is_shared = any(
                path.is_relative_to(shared) or shared.is_relative_to(path)
                for shared in seen_by_courier
            )
            if is_around or is_shared:
                raise SetupError(
                    str(path),
                    expected=f"{name} apart from {folder}, or in its private/",
                    got="what the courier must see too",
                    remedy=f"Move the {name} or the site, and name the new place in silo.toml.",
                )

    @property
    def _anchor_folder(self) -> Path | None:
        # The file is replaced when it is written, so the worker needs its folder.
        if self.anchor is None:
            return None
        return self.anchor.parent

    @property
    def outside_private(self) -> tuple[Path, ...]:
        """What the worker alone writes outside its private folder."""
        folders = (self.ledger, self._anchor_folder, self.jobs)
        outside = [
            folder
            for folder in folders
            if folder is not None and not folder.is_relative_to(self.site.private)
        ]
        return tuple(dict.fromkeys(outside))

    @property
    def closed_to_courier(self) -> tuple[Path, ...]:
        """What the script for two users checks that the courier's cannot read."""
        paths = (self.ledger, self.anchor, self.jobs)
        return tuple(path for path in paths if path and path != self.site.private)

    @property
    def worker(self) -> Access:
        """What the worker sees."""
        reads = [*self._configuration, self.site.inbox, self.data, self.passphrase_file]
        if self.text_encoder is not None:
            reads.append(self.text_encoder)
        return Access(
            reads=tuple(reads),
            writes=(self.site.private, self.site.outbox, *self.outside_private),
            hidden=(self.site.courier,),
        )

    @property
    def courier(self) -> Access:
        """What the courier sees."""
        return Access(
            reads=(*self._configuration, self.site.outbox),
            writes=(self.site.courier, self.site.inbox),
            hidden=(self.site.private, self.data, self.passphrase_file, *self.outside_private),
        )

    @property
    def _configuration(self) -> tuple[Path, Path]:
        return self.site.path / "silo.toml", self.site.path / "policy.toml"


@dataclass(frozen=True)
class ServiceUsers:
    """The users of a site's services; by default their names contain the silo's name.

    Attributes:
        worker: the user of the half with the data.
        courier: the user of the half with the network.
        group: the group of both users.
    """

    worker: str
    courier: str
    group: str


def user_service_files(site: Site, users: ServiceUsers) -> dict[str, str]:
    """Return the files of two services of two users, by their names.

    Raises:
        SetupError: see `SitePaths.of`; or a path cannot be quoted.
    """
    settings = site.settings()
    paths = SitePaths.of(site, settings)
    program = installed_program("silo")
    worker_unit = render(
        "silo",
        "worker.service.jinja",
        silo=settings.silo_id,
        user=users.worker,
        command=_command(program.path, paths.site, "worker"),
        access=_with_program(paths.worker, program.folders),
        has_gpu=settings.training.device != "cpu",
    )
    courier_name = _service_name(settings, "courier")
    courier_unit = render(
        "silo",
        "courier.service.jinja",
        silo=settings.silo_id,
        user=users.courier,
        command=_command(program.path, paths.site, "courier"),
        access=_with_program(paths.courier, program.folders),
        environment=_ENVIRONMENTS / f"{courier_name}.env",
    )
    script = render(
        "silo", "prepare-users.sh.jinja", users=users, paths=paths, program=program.path
    )
    return {
        f"{_service_name(settings, 'worker')}.service": worker_unit,
        f"{courier_name}.service": courier_unit,
        "prepare.sh": script,
    }


def container_service_files(site: Site, image: str, podman: Path) -> dict[str, str]:
    """Return the files of two services of one ordinary user, each a rootless container, by their names.

    Raises:
        SetupError: see `SitePaths.of`; or a path cannot be quoted, or not be mounted.
    """
    settings = site.settings()
    paths = SitePaths.of(site, settings)
    # The half with the data has no network at all; its training processes share memory, of which podman gives 64 MiB.
    worker_options = ["--network=none", "--shm-size=1g"]
    if settings.training.device == "cuda":
        worker_options.append("--device=nvidia.com/gpu=all")
    courier_options = [f"--env={name}" for name in _PROXY_VARIABLES]
    files = {"Containerfile": render("silo", "Containerfile.jinja", image=image)}
    for half, access, options in (
        ("worker", paths.worker, worker_options),
        ("courier", paths.courier, courier_options),
    ):
        name = _service_name(settings, half)
        # A container sees nothing that is not mounted, so nothing has to be hidden.
        mounts = [
            *(mount(path) for path in access.reads),
            *(mount(path, writable=True) for path in access.writes),
        ]
        run = [podman, "run", f"--name={name}", *_CONTAINER_OPTIONS, *options, *mounts, image]
        files[f"{name}.service"] = render(
            "silo",
            "container.service.jinja",
            silo=settings.silo_id,
            half=half,
            command=[*run, *_command("silo", paths.site, half)],
            # SIGKILL after 45 s, before the unit's TimeoutStopSec of 60 s ends podman itself.
            stop=[podman, "stop", "--ignore", "--time=45", name],
            # The proxy's address and password are for the half with the network alone.
            environment=f"{name}.env" if half == "courier" else None,
        )
    return files


def _resolved(path: Path | None) -> Path | None:
    if path is None:
        return None
    return path.resolve()


def _with_program(access: Access, folders: tuple[Path, ...]) -> Access:
    return Access((*access.reads, *folders), access.writes, access.hidden)


def _service_name(settings: SiloSettings, half: str) -> str:
    return f"archipelago-{settings.silo_id}-{half}"


def _command(program: str | Path, site: Site, half: str) -> list[object]:
    return [program, "run", site.path, "--only", half]
