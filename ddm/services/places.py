"""What services have in common: where their program is, which folders systemd hides, what only a person mends."""

import sys
from collections.abc import Iterable
from pathlib import Path

from ddm import errors
from ddm.errors import SetupError
from ddm.system.processes import program

# by ProtectHome and PrivateTmp
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))
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


def needs_person() -> tuple[int, ...]:
    """Return the exit codes after which starting again does not help."""
    return tuple(kind.exit_code for kind in _NEEDS_PERSON)


def installed(name: str) -> tuple[Path, tuple[Path, ...]]:
    """Return a program of ours, and the folders that it is made of: its environment, and Python's own."""
    found = program(name).absolute()
    roots = {
        found.parent.parent,
        Path(sys.base_prefix).resolve(),
        Path(__file__).resolve().parents[2],
    }
    return found, tuple(
        sorted(each for each in roots if not any(other in each.parents for other in roots))
    )


def hidden_by_systemd(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return those of some paths that a service sees only where its unit names them."""
    return tuple(each for each in paths if any(root in (each, *each.parents) for root in _HIDDEN))


def require_passphrase_file(path: str | None, configuration: str) -> Path:
    """Return the file that a service reads its passphrase from.

    Raises:
        SetupError: the configuration names none; a service cannot be asked.
    """
    if path is None:
        remedy = f'Add passphrase_file = "FILE" to {configuration}; the first line of FILE is the passphrase.'
        got = "a passphrase that a person types"
        raise SetupError(configuration, expected="passphrase_file, since nobody types one for a service", got=got,
                         remedy=remedy)  # fmt: skip
    return Path(path)
