"""The command `silo service`: writes the files by which a site runs as two services."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddm.errors import SetupError
from ddm.system.console import say
from silo.commands.options import SiteArgument
from silo.config import Site

# A unit names its program by an absolute path.
PODMAN = Path("/usr/bin/podman")


class Kind(StrEnum):
    """What keeps the two halves apart."""

    SYSTEMD = "systemd"
    CONTAINERS = "containers"


def service(
    site: SiteArgument,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write the files into.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="How worker and courier are separated: users under systemd, or rootless containers."
        ),
    ] = Kind.SYSTEMD,
    worker_user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With systemd: user with access to the data (default: silo-ID-worker).",
        ),
    ] = None,
    courier_user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With systemd: user with access to the network (default: silo-ID-courier).",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With systemd: group of both users (default: silo-ID)."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With containers: image (default: localhost/archipelago:VERSION)."
        ),
    ] = None,
) -> None:
    """Write the files that run worker and courier as two separate services; nothing else is changed."""
    from ddm.services.units import write_services
    from ddm.system.version import installed_version
    from silo.services.units import ServiceUsers, container_service_files, user_service_files

    opened_site = Site(site).require()
    silo_id = opened_site.settings().silo_id
    if kind is Kind.SYSTEMD:
        # An option of the other kind would change nothing, and its user would believe that it had.
        if image:
            raise SetupError("--image", expected="--kind containers with it", got="--kind systemd")
        users = ServiceUsers(
            worker_user or f"silo-{silo_id}-worker",
            courier_user or f"silo-{silo_id}-courier",
            group or f"silo-{silo_id}",
        )
        files = user_service_files(opened_site, users)
    else:
        if worker_user or courier_user or group:
            raise SetupError(
                "--worker-user, --courier-user, --group",
                expected="--kind systemd with them",
                got="--kind containers",
                remedy="Leave them out: the containers belong to the user who starts them.",
            )
        default_image = f"localhost/archipelago:{installed_version()}"
        files = container_service_files(opened_site, image or default_image, PODMAN)
    write_services(out, files)
    say(f"Written to {out}: {', '.join(sorted(files))}.")
    say(_next_steps(out, kind))


def _next_steps(out: Path, kind: Kind) -> str:
    if kind is Kind.SYSTEMD:
        return (
            f"As root, after reading them: sh {out / 'prepare.sh'}; cp {out}/*.service /etc/systemd/system/; "
            "systemctl daemon-reload; systemctl enable --now of the two units (docs/how-to/install.md)."
        )
    return (
        f"As the site's owner: make wheelhouse, copy its folder to {out}/wheelhouse, podman build there; "
        f"mkdir -p ~/.config/systemd/user; cp {out}/*.service ~/.config/systemd/user/; systemctl --user enable --now "
        "of the two units (docs/how-to/install.md)."
    )
