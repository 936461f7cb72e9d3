"""Writes services: fills templates with values that are quoted for their place, and puts the files into a folder.

A template is documented by itself, and takes about five values: a name, a user, a command, what the service sees of the
machine, and an option. A value that was not quoted is an error.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ddm import errors
from ddm.errors import ArchipelagoError, BusyError, SetupError
from ddm.io.files import write_atomic
from ddm.services.quoting import (
    Quoted,
    command_line,
    exit_codes,
    image_name,
    shell_word,
    unit_text,
    unit_word,
    user_name,
)
from ddm.system.processes import program

# What ProtectHome and PrivateTmp hide from a service.
_HIDDEN_BY_SYSTEMD = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
# Errors that a new start does not repair.
_NEEDS_PERSON = (
    errors.SetupError,
    errors.MissingFileError,
    errors.PassphraseError,
    errors.DataError,
    errors.DocumentError,
    errors.PolicyError,
    errors.BudgetError,
    errors.AuditError,
    errors.ApprovalError,
    errors.LedgerError,
    errors.SubmissionRefusedError,
)


@dataclass(frozen=True)
class Access:
    """What a service sees of the machine, besides what every program may read.

    Attributes:
        reads: files and folders that it reads.
        writes: those that it writes.
        hidden: those that it must not see.
    """

    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    hidden: tuple[Path, ...] = ()


@dataclass(frozen=True)
class InstalledProgram:
    """A program of ours on this machine.

    Attributes:
        path: the path of the program.
        folders: the folders that it is made of: its environment, the packages, and Python's own.
    """

    path: Path
    folders: tuple[Path, ...]


def installed_program(name: str) -> InstalledProgram:
    """Find a program of ours, such as `silo`."""
    path = program(name).absolute()
    environment = path.parent.parent
    # An editable installation has the packages elsewhere than in its environment.
    packages = Path(__file__).resolve().parents[2]
    folders = {environment, packages, Path(sys.base_prefix).resolve()}
    # One that is inside another one is visible with it.
    outermost = [
        folder for folder in folders if not any(other in folder.parents for other in folders)
    ]
    return InstalledProgram(path, tuple(sorted(outermost)))


def require_passphrase_file(path: str | None, configuration: str) -> Path:
    """Return the file that a service reads its passphrase from, as an absolute path without links.

    Raises:
        SetupError: the configuration names none; a service cannot be asked.
    """
    if path is None:
        raise SetupError(
            configuration,
            expected="passphrase_file, since a service cannot ask for a passphrase",
            got="no passphrase_file",
            remedy=f'Add passphrase_file = "FILE" to {configuration}; the first line of FILE is the passphrase.',
        )
    return Path(path).resolve()


def render(package: str, name: str, **values: object) -> str:
    """Fill a template.

    Args:
        package: holds it in its folder `services/templates`; what it includes may be in that of `ddm`.
        name: its file.
        values: what it names, unquoted.
    """
    return template_environment(package).get_template(name).render(values)


def write_services(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of services into a folder that is new, empty, or holds those of an earlier call.

    Raises:
        BusyError: the folder holds something else.
    """
    present: set[str] = set()
    if folder.is_dir():
        present = {path.name for path in folder.iterdir()}
    other_files = sorted(present - files.keys())
    # A folder of the operator's own, such as /etc/systemd/system, is not to be mixed with generated files by accident.
    # The folder from an earlier call has all of them, and maybe what an operator put beside them: the wheelhouse.
    if other_files and not files.keys() <= present:
        raise BusyError(
            str(folder),
            expected="a new folder, or the one from an earlier call",
            got=f"a folder with {other_files[0]}",
            remedy="Name another folder with --out.",
        )
    for name, text in files.items():
        # Scripts are run by a person; units must not be executable, about which systemd warns.
        mode = 0o755 if name.endswith(".sh") else 0o644
        write_atomic(folder / name, text.encode(), mode=mode)


@cache
def template_environment(package: str) -> Environment:
    """Return what fills the templates of a package, with a filter for each place that a value can have."""
    packages = dict.fromkeys((package, "ddm"))
    loader = ChoiceLoader([PackageLoader(name, "services/templates") for name in packages])
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        finalize=_require_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "word": unit_word,
        "command": command_line,
        "text": unit_text,
        "sh": shell_word,
        "user": user_name,
        "image": image_name,
        "access": _access_lines,
    }
    environment.globals["needs_person"] = exit_codes(kind.exit_code for kind in _NEEDS_PERSON)
    return environment


def _require_quoted(value: object) -> object:
    """Refuse a value that a template would write as it is: a path could end its line and begin a setting."""
    # An error of ours and no user's: some template names a value without its filter.
    if not isinstance(value, Quoted):
        raise ArchipelagoError(
            "template", expected="a value with a filter that quotes it", got=type(value).__name__
        )
    return value


def _access_lines(access: Access) -> Quoted:
    """Return the settings of a systemd unit by which it sees what it should and nothing more.

    `ProtectSystem=strict` lets a service read all but what `_HIDDEN_BY_SYSTEMD` names, and write nothing.
    """
    lines = []
    for path in access.reads:
        if _is_hidden_by_systemd(path):
            lines.append(f"BindReadOnlyPaths={unit_word(path)}")
    for path in access.writes:
        lines.append(f"ReadWritePaths={unit_word(path)}")
        if _is_hidden_by_systemd(path):
            lines.append(f"BindPaths={unit_word(path)}")
    for path in access.hidden:
        # With the minus sign the service starts also where the path does not exist.
        lines.append(f"InaccessiblePaths={unit_word(f'-{path}')}")
    return Quoted("\n".join(lines))


def _is_hidden_by_systemd(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _HIDDEN_BY_SYSTEMD)
