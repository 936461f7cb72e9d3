"""The options that several commands of `ddm` share, and how they open a release."""

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import ArchivedWarningError, SetupError
from ddm.system.console import say
from ddm.system.devices import DeviceName

if TYPE_CHECKING:
    from ddm.loading.release import Release

# The panels of the help.
WHAT, HOW, TRUST, MACHINE = "What to sample", "How to sample", "Verification", "Machine"

ReleaseArgument = Annotated[Path, typer.Argument(metavar="RELEASE", help="The published folder.")]
RootOption = Annotated[
    Path, typer.Option("--root", metavar="FILE", help="The pinned 1.root.json.", rich_help_panel=TRUST)
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="Keeps versions and keys seen, to notice changes.", rich_help_panel=TRUST
    ),
]
SiloKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--silo-key", metavar="ID=FPR", help="Pin a silo's key by its fingerprint; repeatable.", rich_help_panel=TRUST
    ),
]
AcceptKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-key",
        metavar="ID=FPR",
        help="Let a silo's key take the place of the one remembered; repeatable.",
        rich_help_panel=TRUST,
    ),
]
ArchivedOption = Annotated[
    bool, typer.Option("--archived", help="Accept an expired timestamp, with a warning.", rich_help_panel=TRUST)
]
CheckpointOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        metavar="FILE",
        help="A checkpoint of the log that somebody else got; repeatable.",
        rich_help_panel=TRUST,
    ),
]
DeviceOption = Annotated[
    DeviceName, typer.Option("--device", help="auto: a GPU, if there is one.", rich_help_panel=MACHINE)
]


class Dtype(StrEnum):
    """The precision of the experts' matrix products."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Precision of matrix products; tf32, float16: GPU.", rich_help_panel=MACHINE)
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile experts: a slow start, then faster.", rich_help_panel=MACHINE)
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes", min=1, max=64, help="Processes that share samples and threads.", rich_help_panel=MACHINE
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Most memory, e.g. 4GiB; default: 75% of what is available.",
        rich_help_panel=MACHINE,
    ),
]
# One owner's islands: the folder, and the keys in it.
OWN_KEYS = "Passphrase of the owner's keys"
IslandsArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `ddm split` made.")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", metavar="FILE", help="Its first line opens the owner's keys.")
]

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CELL, _PICTURE_BYTES = 68, 8  # of a grid: sides of the smallest cell, bytes of a pixel with its copies

# How images are sampled, from a release or a student.
NumOption = Annotated[int, typer.Option("--num", min=1, help="How many images.", rich_help_panel=WHAT)]
ImagesOption = Annotated[
    Path,
    typer.Option("--out", help="FILE.png (grid), .npz (float32), .nii.gz (volumes) or a folder.", rich_help_panel=WHAT),
]
ClassOption = Annotated[
    int | None, typer.Option("--class", min=0, help="The class of all images.", rich_help_panel=WHAT)
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", metavar="PROMPT", help="The text that all images shall fit.", rich_help_panel=WHAT),
]
TextEncoderOption = Annotated[
    Path | None,
    typer.Option(
        "--text-encoder", metavar="FOLDER", help="With --text: the encoder that the plan pins.", rich_help_panel=WHAT
    ),
]
GuidanceOption = Annotated[
    float | None,
    typer.Option(
        "--guidance",
        min=0.0,
        max=1000.0,
        help="Guidance scale g, with --class or --text; default 0.",
        rich_help_panel=WHAT,
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, max=10_000, help="Solver steps.", rich_help_panel=HOW)]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same images.", rich_help_panel=HOW)]


class SolverName(StrEnum):
    """The ODE solver."""

    EULER = "euler"
    HEUN = "heun"
    MIDPOINT = "midpoint"
    RK4 = "rk4"
    EXPONENTIAL = "exponential"
    DPM = "dpm"
    UNIPC = "unipc"


SolverOption = Annotated[SolverName, typer.Option("--solver", help="ODE solver.", rich_help_panel=HOW)]


def open_verified(
    release: Path,
    root: Path,
    state: Path | None,
    silo_key: list[str] | None,
    accept_key: list[str] | None,
    archived: bool,
    *,
    experts_later: bool = False,
    checkpoints: Sequence[Path] = (),
) -> "Release":
    """Verify a release, read its documents, and tell what changed; see `ddm.loading.release.open_release`."""
    from ddm.io.files import read_bounded
    from ddm.loading.release import open_release
    from ddm.trust.log.proof import MAX_PROOF_BYTES
    from ddm.trust.verify import default_state

    opened = open_release(
        release,
        root=root,
        state=state or default_state(),
        silo_keys=pins(silo_key),
        accepted_keys=pins(accept_key, "--accept-key"),
        archived=archived,
        experts_later=experts_later,
        checkpoints={str(path): read_bounded(path, MAX_PROOF_BYTES) for path in checkpoints},
    )
    for news in opened.verified.told:
        say(f"note: {news}", error=True)
    return opened


def read_memory(text: str | None) -> int | None:
    """Read the value of --memory.

    Raises:
        SetupError: not a size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?(KiB|MiB|GiB|TiB|)", text.strip())
    if not match:
        raise SetupError("--memory", expected="a size such as 2GiB or 500MiB", got=repr(text[:40]))
    return int(float(match[1]) * _UNITS[match[2]])


def picture_bytes(out: Path, num: int, shape: Sequence[int]) -> int:
    """Return the bytes of a grid of samples, whose cells are enlarged to be readable; 0 for other files."""
    side = _CELL + max(shape[-2:])
    return _PICTURE_BYTES * num * side**2 if out.suffix == ".png" else 0


def pins(silo_key: list[str] | None, flag: str = "--silo-key") -> dict[str, str]:
    """Read fingerprints by silo.

    Raises:
        SetupError: one that is not ID=FINGERPRINT.
    """
    from ddm.trust.keys import parse_fingerprint

    pins: dict[str, str] = {}
    for text in silo_key or []:
        silo_id, equals, fingerprint = text.partition("=")
        if not equals or not silo_id:
            raise SetupError(flag, expected="ID=FINGERPRINT, 64 hexadecimal digits", got=repr(text[:100]))
        pins[silo_id] = parse_fingerprint(fingerprint)
    return pins


def warn_if_expired(release: "Release") -> None:
    """Warn, with an exit code of its own, when everything but the timestamp verified.

    Raises:
        ArchivedWarningError: the timestamp has expired.
    """
    if release.verified.expired:
        raise ArchivedWarningError(
            "WARNING: the timestamp has expired; everything else verified",
            expected="a timestamp that is still valid",
            got=f"a timestamp that expired {release.verified.expires.isoformat()}",
        )
