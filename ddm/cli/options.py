"""The options that several commands of `ddm` share, alone and in groups that belong together.

A group is a frozen dataclass with an option for each field. A command under `grouped` takes one as a parameter, and the
program shows its fields among the command's own options. A field may itself be a group.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ddm.errors import ArchivedWarningError, SetupError
from ddm.fetching.address import read_address
from ddm.protocol.architecture import learns_null
from ddm.protocol.base import MAX_INTEGER
from ddm.system.console import progress, say
from ddm.system.devices import DeviceName

if TYPE_CHECKING:
    import torch

    from ddm.fetching.hosted import FetchOptions, HostedRelease, OnProgress
    from ddm.loading.release import Release
    from ddm.models.arithmetic import Arithmetic
    from ddm.protocol.architecture import Condition
    from ddm.sampling.guidance import ConditionValue
    from ddm.trust.log.witness import Witnesses

# The panels of the help.
WHAT = "What to sample"
HOW = "How to sample"
TRUST = "Verification"
MACHINE = "Machine"

# A published release and its root of trust.
ReleaseArgument = Annotated[
    str,
    typer.Argument(
        metavar="RELEASE",
        help="The published folder, or https://HOST/PATH, or hf://OWNER/NAME@REVISION.",
    ),
]
RootOption = Annotated[
    Path,
    typer.Option("--root", metavar="FILE", help="The pinned 1.root.json.", rich_help_panel=TRUST),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A student's FILE.safetensors, or a release: its folder, or https://HOST/PATH, or "
        "hf://OWNER/NAME@REVISION.",
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="Folder that remembers versions and keys, to detect changes.",
        rich_help_panel=TRUST,
    ),
]
SiloKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--silo-key",
        metavar="ID=FPR",
        help="Pin a silo's key by its fingerprint; repeatable.",
        rich_help_panel=TRUST,
    ),
]
AcceptKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-key",
        metavar="ID=FPR",
        help="Accept a silo's new key in place of the remembered one; repeatable.",
        rich_help_panel=TRUST,
    ),
]
ArchivedOption = Annotated[
    bool,
    typer.Option(
        "--archived", help="Accept an expired timestamp, with a warning.", rich_help_panel=TRUST
    ),
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Folder for what is fetched (default: $ARCHIPELAGO_CACHE, or ~/.cache/archipelago).",
        rich_help_panel=TRUST,
    ),
]
CheckpointOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        metavar="FILE",
        help="A checkpoint of the log from somebody else; repeatable.",
        rich_help_panel=TRUST,
    ),
]
# The machine.
DeviceOption = Annotated[
    DeviceName,
    typer.Option(
        "--device",
        help="Device to compute on; auto: a GPU if there is one.",
        rich_help_panel=MACHINE,
    ),
]
CheckpointSecondsOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-s",
        min=0,
        max=86400,
        help="Maximum number of seconds between two checkpoints of a training.",
        rich_help_panel=MACHINE,
    ),
]


class Dtype(StrEnum):
    """The precision of the experts' matrix products."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="Precision of matrix products; tf32 and float16 need a GPU.",
        rich_help_panel=MACHINE,
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the experts: slower to start, then faster.",
        rich_help_panel=MACHINE,
    ),
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        max=64,
        help="Number of processes that share the samples and threads.",
        rich_help_panel=MACHINE,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Maximum memory, e.g. 4GiB (default: 75% of the available).",
        rich_help_panel=MACHINE,
    ),
]
# One owner's islands: the folder, and the keys in it.
OWN_KEYS = "Passphrase of the owner's keys"
IslandsArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder that `ddm split` made.")
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="File whose first line is the passphrase of the owner's keys.",
    ),
]

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Of a grid of samples.
_MIN_CELL_SIDE = 68
_PIXEL_BYTES = 8  # with its copies

# How images are sampled, from a release or a student.
NumOption = Annotated[
    int, typer.Option("--num", min=1, help="Number of images.", rich_help_panel=WHAT)
]
FirstOption = Annotated[
    int,
    typer.Option(
        "--first",
        min=0,
        max=MAX_INTEGER,
        help="Number of the first image, to draw a set in parts.",
        rich_help_panel=WHAT,
    ),
]
ImagesOption = Annotated[
    Path,
    typer.Option(
        "--out",
        help="Output: FILE.png (grid), .npz (float32), .nii.gz (volumes) or a folder.",
        rich_help_panel=WHAT,
    ),
]
ClassOption = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="CLASS",
        help="The class of all images, by name or number.",
        rich_help_panel=WHAT,
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="PROMPT", help="The text prompt for all images.", rich_help_panel=WHAT
    ),
]
TextEncoderOption = Annotated[
    Path | None,
    typer.Option(
        "--text-encoder",
        metavar="FOLDER",
        help="With --text: the encoder that the plan pins.",
        rich_help_panel=WHAT,
    ),
]
GuidanceOption = Annotated[
    float | None,
    typer.Option(
        "--guidance",
        min=0.0,
        max=1000.0,
        help="Guidance scale, with --class or --text (default: 0).",
        rich_help_panel=WHAT,
    ),
]
StepsOption = Annotated[
    int,
    typer.Option("--steps", min=1, max=10_000, help="Number of solver steps.", rich_help_panel=HOW),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        help="Random seed; the same seed gives the same images.",
        rich_help_panel=HOW,
    ),
]


class SolverChoice(StrEnum):
    """The ODE solver."""

    EULER = "euler"
    HEUN = "heun"
    MIDPOINT = "midpoint"
    RK4 = "rk4"
    DPM = "dpm"


SolverOption = Annotated[
    SolverChoice, typer.Option("--solver", help="ODE solver.", rich_help_panel=HOW)
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose groups of options are seen as the options in them, in their place and order."""
    # `include_extras` keeps `Annotated`, in which typer finds an option's name and help.
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation: Any = hints[parameter.name]
        if is_dataclass(annotation):
            groups[parameter.name] = annotation
        options += _options_in(parameter.replace(annotation=annotation))
    # A signature refuses a parameter without a default after one with a default, unless both are keyword-only.
    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    @wraps(command)
    def call_with_groups(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = _take_group(group, values)
        command(**values)

    # typer reads the options from the signature and the annotations.
    call_with_groups.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    call_with_groups.__annotations__ = {option.name: option.annotation for option in options}
    return call_with_groups


def _options_in(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter as an option, or the options in a group."""
    if not is_dataclass(parameter.annotation):
        return [parameter]
    options = []
    for field in inspect.signature(parameter.annotation).parameters.values():  # type: ignore[arg-type]
        options += _options_in(field)
    return options


def _take_group(group: Any, values: dict[str, Any]) -> Any:
    """Build a group from the values of its options, which are removed from `values`."""
    group_values = {}
    for field in fields(group):
        if is_dataclass(field.type):
            group_values[field.name] = _take_group(field.type, values)
        else:
            group_values[field.name] = values.pop(field.name)
    return group(**group_values)


@contextmanager
def fetch_progress(release: str) -> "Iterator[OnProgress]":
    """Show how much of a release was fetched, on a terminal; nothing for a folder of this machine."""
    if read_address(release) is None:
        yield lambda num_bytes, total_bytes: None
    elif sys.stdout.isatty():
        with progress(f"fetching {release}") as advance:
            yield advance
    else:
        # Standard output may be a document for a program.
        say(f"fetching {release}", error=True)
        yield lambda num_bytes, total_bytes: None


@dataclass(frozen=True)
class Verification:
    """How a release is verified before anything in it is used."""

    root: RootOption
    state: StateOption = None
    silo_key: SiloKeyOption = None
    accept_key: AcceptKeyOption = None
    archived: ArchivedOption = False
    cache: CacheOption = None

    def open(
        self,
        release: str,
        *,
        experts_later: bool = False,
        checkpoints: Sequence[Path] = (),
        witnesses: "Witnesses | None" = None,
    ) -> "Release":
        """Verify a release in a folder or on a host; see `open_place`."""
        from ddm.fetching.opening import place_of
        from ddm.loading.release import read_root

        with fetch_progress(release) as advance:
            place = place_of(release, read_root(self.root), self.fetch_options(), advance)
            if not isinstance(place, Path) and not experts_later:
                place.fetch_experts(on_progress=advance)
        return self.open_place(
            place, experts_later=experts_later, checkpoints=checkpoints, witnesses=witnesses
        )

    def fetch_options(self) -> "FetchOptions":
        """Return how a release on a host is fetched."""
        from ddm.fetching.cache import default_cache_folder
        from ddm.fetching.hosted import FetchOptions
        from ddm.trust.state_folder import default_state_folder

        return FetchOptions(
            cache=self.cache or default_cache_folder(),
            state=self.state or default_state_folder(),
            archived=self.archived,
        )

    def open_place(
        self,
        place: "Path | HostedRelease",
        *,
        experts_later: bool = False,
        checkpoints: Sequence[Path] = (),
        witnesses: "Witnesses | None" = None,
    ) -> "Release":
        """Verify a release, read its documents, and tell what changed; see `ddm.loading.release.open_release`."""
        from ddm.io.files import read_bounded
        from ddm.loading.log import LogRequirements
        from ddm.loading.release import open_release
        from ddm.trust.log.proof import MAX_PROOF_BYTES
        from ddm.trust.state_folder import default_state_folder

        named_checkpoints = {str(path): read_bounded(path, MAX_PROOF_BYTES) for path in checkpoints}
        opened = open_release(
            place,
            root=self.root,
            # A reader who names no folder is protected against old versions all the same.
            state=self.state or default_state_folder(),
            silo_keys=pins(self.silo_key),
            accepted_keys=pins(self.accept_key, "--accept-key"),
            archived=self.archived,
            experts_later=experts_later,
            log_requirements=LogRequirements(named_checkpoints, witnesses),
        )
        # What readers must know although everything verified, such as a rotated key.
        for news in opened.verified.notices:
            say(f"note: {news}", error=True)
        return opened


@dataclass(frozen=True)
class ModelVerification:
    """How a release is verified, in a command that takes a student too; a student is not signed."""

    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            metavar="FILE",
            help="The pinned 1.root.json, for a release.",
            rich_help_panel=TRUST,
        ),
    ] = None
    state: StateOption = None
    silo_key: SiloKeyOption = None
    accept_key: AcceptKeyOption = None
    archived: ArchivedOption = False
    cache: CacheOption = None

    def of_release(self) -> Verification:
        """Return how the release is verified.

        Raises:
            SetupError: no root.
        """
        if self.root is None:
            raise SetupError(
                "--root",
                expected="the pinned 1.root.json, since releases are verified first",
                got="no --root",
                remedy="Add --root FILE.",
            )
        return Verification(
            self.root, self.state, self.silo_key, self.accept_key, self.archived, self.cache
        )


def is_student(model: str) -> bool:
    """Return whether the argument of a command names a student's file, and no release."""
    return read_address(model) is None and Path(model).suffix == ".safetensors"


def refuse_options_of_release(student: str, options: Mapping[str, object]) -> None:
    """Refuse options that mean nothing for a student.

    Args:
        student: its file.
        options: values by the option's name; those that are not given are false.

    Raises:
        SetupError: names the option.
    """
    for name, value in options.items():
        if value:
            raise SetupError(
                name,
                expected=f"a release's folder or address, or no {name}",
                got=f"the file {Path(student).name}",
                remedy=f"Leave {name} out, or name the folder or the address of a release.",
            )


@dataclass(frozen=True)
class ConditionOptions:
    """The condition of all samples of one command.

    Raises:
        SetupError: options that do not go together, or a blank text.
    """

    label: ClassOption = None
    text: TextOption = None
    text_encoder: TextEncoderOption = None
    guidance: GuidanceOption = None

    def __post_init__(self) -> None:
        if self.guidance is not None and self.label is None and self.text is None:
            got = f"{self.guidance!r} without a condition"
            raise SetupError("--guidance", expected="--class or --text as well", got=got)
        if self.text is not None and self.label is not None:
            raise SetupError(
                "--text",
                expected="either --text or --class",
                got=f"both, with --class {self.label}",
            )
        # A prompt without its encoder, or the reverse, would be ignored silently.
        check_text(self.text, self.text_encoder)

    @property
    def has_condition(self) -> bool:
        """Whether there is a condition."""
        return self.label is not None or self.text is not None

    def value(self, condition: "Condition") -> "ConditionValue | None":
        """Return the condition in the form in which experts of this kind take it, None where there is none.

        Raises:
            SetupError: experts that take another kind of condition, have no such class, or cannot do without one.
        """
        from ddm.cli.conditions import class_number, encode_text

        if not self.has_condition:
            check_null(condition, "condition", f"Give --{condition.kind}.")
        # Guidance moves away from the answer without a condition, which such experts never learned.
        if self.guidance:
            check_null(condition, "--guidance", "Leave --guidance out.")
        if self.label is not None:
            return class_number(self.label, condition)
        if self.text is None or self.text_encoder is None:
            return None

        return encode_text(self.text, self.text_encoder, condition)


@dataclass(frozen=True)
class SolverOptions:
    """How samples move from noise to data."""

    steps: StepsOption = 25
    solver: SolverOption = SolverChoice.MIDPOINT
    seed: SeedOption = 0


@dataclass(frozen=True)
class MachineOptions:
    """What this machine gives to sampling.

    Raises:
        SetupError: --memory is not a size.
    """

    device: DeviceOption = "auto"
    dtype: DtypeOption = Dtype.FLOAT32
    compiled: CompileOption = False
    processes: ProcessesOption = 1
    memory: MemoryOption = None

    def __post_init__(self) -> None:
        # Only checked here, so that a typing error is found before the release is read.
        read_memory(self.memory)

    def arithmetic(self) -> "Arithmetic":
        """Return how experts compute on the device; leaves compilation out, with a note, where torch cannot.

        Raises:
            SetupError: there is no such device, or it has no such precision.
        """
        from ddm.models.arithmetic import Arithmetic
        from ddm.system.devices import device_named

        device = device_named(self.device, setting="--device")
        arithmetic = Arithmetic(self.dtype.value, self.compiled and _can_compile(device))
        arithmetic.check(device)
        return arithmetic


def _can_compile(device: "torch.device") -> bool:
    """Return whether torch can compile here; say so where it cannot."""
    from ddm.models.arithmetic import why_not_compiled

    problem = why_not_compiled(device)
    if problem is not None:
        say(f"note: --compile is left out, since torch cannot compile here: {problem}", error=True)
    return problem is None


def check_text(text: str | None, folder: Path | None) -> None:
    """Refuse a text without its encoder, an encoder without a text, or a blank text.

    Raises:
        SetupError: the options do not go together, or the text is blank.
    """
    if text is None and folder is not None:
        raise SetupError(
            "--text-encoder",
            expected="--text as well",
            got=f"the folder {folder.name} without a text",
        )
    if text is not None and folder is None:
        expected = "--text-encoder as well, the folder of the encoder that the plan pins"
        raise SetupError(
            "--text",
            expected=expected,
            got="a text without an encoder",
            remedy="Add --text-encoder FOLDER; where the experts were trained without texts, leave --text out.",
        )
    if text is not None and not text.strip():
        raise SetupError("--text", expected="a text", got=f"{len(text)} blank characters")


def check_null(condition: "Condition", subject: str, remedy: str) -> None:
    """Refuse to leave the condition out, or to guide away from that, where experts always had one in training.

    Raises:
        SetupError: the plan's `condition.drop` is 0, so that the experts' answers without a condition are untrained.
    """
    if not learns_null(condition):
        raise SetupError(
            subject,
            expected="experts that have also learned to do without their condition",
            got=f"experts that were always trained with a {condition.kind} (drop = 0)",
            remedy=remedy,
        )


def read_memory(text: str | None) -> int | None:
    """Read the value of --memory.

    Raises:
        SetupError: not a size.
    """
    if text is None:
        return None
    # Bounded digits, so that the number cannot overflow.
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?(KiB|MiB|GiB|TiB|)", text.strip())
    if not match:
        raise SetupError("--memory", expected="a size such as 2GiB or 500MiB", got=repr(text[:40]))
    return int(float(match[1]) * _UNITS[match[2]])


def picture_bytes(out: Path, num: int, shape: Sequence[int]) -> int:
    """Return the bytes of a grid of samples, whose cells are enlarged to be readable; 0 for other files."""
    if out.suffix != ".png":
        return 0
    side = _MIN_CELL_SIDE + max(shape[-2:])
    return _PIXEL_BYTES * num * side**2


def pins(silo_key: list[str] | None, flag: str = "--silo-key") -> dict[str, str]:
    """Read fingerprints by silo.

    Raises:
        SetupError: one that is not ID=FINGERPRINT, or two for one silo.
    """
    from ddm.trust.keys import parse_fingerprint

    pins: dict[str, str] = {}
    for text in silo_key or []:
        silo_id, equals, fingerprint = text.partition("=")
        if not equals or not silo_id:
            raise SetupError(
                flag, expected="ID=FINGERPRINT, 64 hexadecimal digits", got=repr(text[:100])
            )
        # Of two different pins the second would win without a word.
        if silo_id in pins:
            raise SetupError(
                flag, expected="one fingerprint for each silo", got=f"two for {silo_id[:100]!r}"
            )
        pins[silo_id] = parse_fingerprint(fingerprint)
    return pins


def warn_if_expired(release: "Release") -> None:
    """Warn, with an exit code of its own, when everything but the timestamp verified.

    Raises:
        ArchivedWarningError: the timestamp has expired.
    """
    # The release was used all the same, because --archived allowed it.
    if release.verified.expired:
        raise ArchivedWarningError(
            "WARNING: the timestamp has expired; everything else verified",
            expected="a timestamp that is still valid",
            got=f"a timestamp that expired {release.verified.expires.isoformat()}",
        )
