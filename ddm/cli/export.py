"""The command `ddm export`: write a student, an expert or a router for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import (
    ModelArgument,
    ModelVerification,
    fetch_progress,
    grouped,
    is_student,
    refuse_options_of_release,
    warn_if_expired,
)
from ddm.errors import SetupError
from ddm.system.console import say

if TYPE_CHECKING:
    from ddm.export.card import Form
    from ddm.export.model import ExportedModel
    from ddm.loading.release import Release

_FORMS = "Form of the export"


@dataclass(frozen=True)
class ReleaseOptions:
    """Which part of a release is exported, and how the release is verified; a student has none of these."""

    expert: Annotated[
        str | None, typer.Option("--expert", metavar="NAME", help="Name of the expert to export.")
    ] = None
    router: Annotated[
        bool, typer.Option("--router", help="Export the router instead of an expert.")
    ] = False
    verification: ModelVerification = ModelVerification()

    def check_student(self, source: str) -> None:
        """Refuse options of a release where the source is a student.

        Raises:
            SetupError: names the option.
        """
        refuse_options_of_release(
            source,
            {
                "--root": self.verification.root,
                "--expert": self.expert,
                "--router": self.router,
            },
        )

    def open(self, source: str) -> "Release":
        """Verify the release.

        Raises:
            SetupError: no root, or not one of --expert and --router.
            TrustError, FormatError: see `Verification.open`.
        """
        num_parts = int(self.expert is not None) + int(self.router)
        if num_parts != 1:
            raise SetupError(
                "ddm export",
                expected="one of --expert NAME and --router, for a release",
                got=f"{num_parts} of them",
                remedy="Add --expert NAME, one of those that `ddm info RELEASE --root FILE --json` lists, or --router. "
                "A whole ensemble opens in Python (docs/how-to/export.md).",
            )
        return self.verification.of_release().open(source, experts_later=True)


@dataclass(frozen=True)
class FormOptions:
    """The form of the export, and the folder that is written: one of three.

    Raises:
        SetupError: none of them, or several.
    """

    diffusers: Annotated[
        Path | None,
        typer.Option(
            "--diffusers",
            metavar="OUT",
            help="Folder to write for diffusers.",
            rich_help_panel=_FORMS,
        ),
    ] = None
    onnx: Annotated[
        Path | None,
        typer.Option(
            "--onnx",
            metavar="OUT",
            help="Folder to write, with model.onnx.",
            rich_help_panel=_FORMS,
        ),
    ] = None
    torch_export: Annotated[
        Path | None,
        typer.Option(
            "--torch-export",
            metavar="OUT",
            help="Folder to write, with model.pt2.",
            rich_help_panel=_FORMS,
        ),
    ] = None

    def __post_init__(self) -> None:
        if len(self._chosen_forms()) != 1:
            names = ", ".join(f"--{form}" for form, _ in self._chosen_forms())
            raise SetupError(
                "ddm export",
                expected="one of --diffusers OUT, --onnx OUT and --torch-export OUT",
                got=names or "none of them",
            )

    @property
    def form(self) -> "Form":
        """The form."""
        return self._chosen_forms()[0][0]

    @property
    def out(self) -> Path:
        """The folder that is written."""
        return self._chosen_forms()[0][1]

    def _chosen_forms(self) -> list[tuple["Form", Path]]:
        forms: list[tuple[Form, Path | None]] = [
            ("diffusers", self.diffusers),
            ("onnx", self.onnx),
            ("torch-export", self.torch_export),
        ]
        return [(form, out) for form, out in forms if out is not None]


@grouped
def export(
    source: ModelArgument,
    *,
    forms: FormOptions,
    release_options: ReleaseOptions,
) -> None:
    """Write a student, or an expert or the router of a release, for diffusers, ONNX or torch.export."""
    if forms.out.exists():
        raise SetupError(
            str(forms.out),
            expected="the name of a new folder",
            got="a file or folder that exists",
            remedy="Name another folder, or remove this one.",
        )
    if forms.form == "diffusers" and release_options.router:
        raise SetupError(
            "--router",
            expected="--onnx or --torch-export with it",
            got="--diffusers, which has no routers",
            remedy="Export it with --torch-export OUT.",
        )
    if forms.form == "onnx":
        from ddm.export.programs import require_onnx

        # Before the weights are read.
        require_onnx()
    if is_student(source):
        release_options.check_student(source)
        from ddm.export.model import open_student

        _write(open_student(Path(source)), forms)
        return

    release = release_options.open(source)
    from ddm.export.model import open_expert, open_router

    model: ExportedModel
    if release_options.expert is None:
        model = open_router(release)
    else:
        with fetch_progress(source) as advance:
            model = open_expert(release, release_options.expert, advance)
    _write(model, forms)
    # Last, since it raises.
    warn_if_expired(release)


def _write(model: "ExportedModel", forms: FormOptions) -> None:
    """Write the folder whole or not at all, with its card."""
    from ddm.export.card import write_card
    from ddm.export.diffusers_folder import is_plain, write_diffusers_folder
    from ddm.export.model import ExportedExpert
    from ddm.export.programs import write_onnx, write_torch_program
    from ddm.io.files import move_into_place, staging_folder

    opens_alone = False
    with staging_folder(forms.out) as folder:
        if isinstance(model, ExportedExpert) and forms.form == "diffusers":
            write_diffusers_folder(model, folder)
            opens_alone = is_plain(model)
        elif forms.form == "onnx":
            write_onnx(model, folder)
        else:
            write_torch_program(model, folder)
        write_card(model, forms.form, folder, is_plain=opens_alone)
        move_into_place(folder, forms.out)
    say(f"{model.origin.name} in {forms.out}, as {forms.form}. Its README.md says how to use it.")
    say("Images that other programs draw with it have no mark: mark them as synthetic.")
