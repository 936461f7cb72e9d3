"""The command `silo service`: writes the files by which a site runs as two services."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddm.errors import SetupError
from ddm.system.console import say
from silo.commands.options import SiteArgument
from silo.config import Site

PODMAN = Path("/usr/bin/podman")


class Kind(StrEnum):
    """What keeps the two halves apart."""

    SYSTEMD = "systemd"
    CONTAINERS = "containers"


def service(
    site: SiteArgument,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write the files into.")],
    kind: Annotated[
        Kind, typer.Option(help="Two users under systemd, or two rootless containers.")
    ] = Kind.SYSTEMD,
    worker_user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With systemd: who has the data; default: silo-ID-worker."
        ),
    ] = None,
    courier_user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With systemd: who has the network; default: silo-ID-courier."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With systemd: what the two share; default: silo-ID."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With containers: default localhost/archipelago:VERSION."
        ),
    ] = None,
) -> None:
    """Write the files by which worker and courier run as services apart from each other; changes nothing else."""
    from importlib.metadata import version

    from ddm.services.rendering import write_services
    from silo.services.units import Names, as_containers, as_users

    place = Site(site).require()
    silo_id = place.settings().silo_id
    if kind is Kind.SYSTEMD:
        if image:
            raise SetupError("--image", expected="--kind containers with it", got="--kind systemd")
        named = (worker_user or f"silo-{silo_id}-worker", courier_user or f"silo-{silo_id}-courier")
        files = as_users(place, Names(*named, group or f"silo-{silo_id}"))
    else:
        if worker_user or courier_user or group:
            remedy = "Leave them out: the containers belong to the user who starts them."
            raise SetupError("--worker-user, --courier-user, --group", expected="--kind systemd with them",
                             got="--kind containers", remedy=remedy)  # fmt: skip
        files = as_containers(
            place, image or f"localhost/archipelago:{version('archipelago')}", PODMAN
        )
    write_services(out, files)
    say(f"Written to {out}: {', '.join(sorted(files))}.")
    say(_next_steps(out, kind))


def _next_steps(out: Path, kind: Kind) -> str:
    if kind is Kind.SYSTEMD:
        return (
            f"As root, after reading them: sh {out / 'prepare.sh'}; cp {out}/*.service /etc/systemd/system/; "
            "systemctl daemon-reload; systemctl enable --now of the two units (docs/how-to/two-users.md)."
        )
    return (
        f"As the site's owner: make wheelhouse, copy its folder to {out}/wheelhouse, podman build there; "
        f"mkdir -p ~/.config/systemd/user; cp {out}/*.service ~/.config/systemd/user/; systemctl --user enable --now "
        "of the two units (docs/how-to/containers.md)."
    )
