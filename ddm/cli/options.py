"""What the researcher's commands share: which release, whom to trust, and how it is opened."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import ArchivedWarningError, SetupError
from ddm.system.devices import DeviceName

if TYPE_CHECKING:
    from ddm.loading.release import Release

ReleaseArgument = Annotated[Path, typer.Argument(metavar="RELEASE", help="The published folder.")]
RootOption = Annotated[Path, typer.Option("--root", metavar="FILE", help="The pinned 1.root.json.")]
StateOption = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where versions seen are kept, so that a rollback shows.")
]
SiloKeyOption = Annotated[
    list[str] | None, typer.Option("--silo-key", metavar="ID=FPR", help="Pin a silo's key by its fingerprint.")
]
ArchivedOption = Annotated[bool, typer.Option("--archived", help="Accept an expired timestamp, loudly.")]
DeviceOption = Annotated[DeviceName, typer.Option("--device", help="Where to compute; auto: a GPU, if there is one.")]


def open_verified(
    release: Path,
    root: Path,
    state: Path | None,
    silo_key: list[str] | None,
    archived: bool,
    *,
    experts_later: bool = False,
) -> "Release":
    """Verify a release and read its documents; see `ddm.loading.release.open_release`."""
    from ddm.loading.release import open_release
    from ddm.trust.verify import default_state

    return open_release(
        release,
        root=root,
        state=state or default_state(),
        silo_keys=pins(silo_key),
        archived=archived,
        experts_later=experts_later,
    )


def pins(silo_key: list[str] | None) -> dict[str, str]:
    """Read pinned fingerprints by silo.

    Raises:
        SetupError: a pin of another form.
    """
    from ddm.trust.keys import parse_fingerprint

    pins: dict[str, str] = {}
    for text in silo_key or []:
        silo_id, equals, fingerprint = text.partition("=")
        if not equals or not silo_id:
            raise SetupError("--silo-key", expected="ID=FINGERPRINT, 64 hexadecimal digits", got=text[:100])
        pins[silo_id] = parse_fingerprint(fingerprint)
    return pins


def warn_if_expired(release: "Release") -> None:
    """Say so, with a code of its own, when all but the timestamp verified.

    Raises:
        ArchivedWarningError: it did.
    """
    if release.verified.expired:
        raise ArchivedWarningError(
            "WARNING: the timestamp has expired; everything else verified",
            expected="a timestamp that is still valid",
            got=f"one that ended {release.verified.expires.isoformat()}",
        )
