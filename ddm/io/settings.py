"""Configuration: one TOML file into one frozen model, with errors that name the field."""

import json
import tomllib
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from ddm.errors import SetupError
from ddm.io.files import read_bounded, require_file, write_atomic

_TOML_REMEDY = (
    "Correct that place, then run it again: text is in quotes, a path with backslashes in single quotes; numbers have "
    "a point and no comma; the file is saved as UTF-8."
)
MAX_SETTINGS_BYTES = 16 * 1024  # a name of 30,000 parts takes tomllib gigabytes


class Settings(BaseModel):
    """A configuration file: frozen, no unknown fields; TOML's own types are strict enough."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


SettingsT = TypeVar("SettingsT", bound=BaseModel)


def load_settings(
    model: type[SettingsT], path: Path, *, added: Mapping[str, object] | None = None
) -> SettingsT:
    """Read a TOML file into `model`.

    Args:
        model: the model.
        path: the file.
        added: tables that the command line states, which the file then must leave out.

    Raises:
        MissingFileError: there is no such file.
        FormatError: it is longer than `MAX_SETTINGS_BYTES`.
        SetupError: it is not TOML, or a field is wrong; the message names it.
    """
    require_file(path, "a configuration file")
    # An operator may name a link; `read_bounded` follows none.
    data = read_bounded(path.resolve(), MAX_SETTINGS_BYTES, subject=str(path))
    try:
        # Editors on Windows may begin a file with a byte order mark.
        values = tomllib.loads(data.decode("utf-8-sig"))
        _add_tables(values, added or {}, path)
        # Through JSON, because strict parts of a document take JSON's arrays for tuples but not Python's lists.
        return model.model_validate_json(json.dumps(values, default=_as_json))
    except ValidationError as error:
        raise settings_error(path, error) from error
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: a number of 5,000 digits
        raise SetupError(
            str(path), expected="TOML", got=str(error)[:200], remedy=_TOML_REMEDY
        ) from error


def _add_tables(values: dict[str, object], added: Mapping[str, object], path: Path) -> None:
    for name, table in added.items():
        if name in values:
            raise SetupError(
                f"{path}, field {name}",
                expected="either this table or the options that state it",
                got=f"a table [{name}]",
                remedy=f"Take the table [{name}] out of {path.name}, or leave the options out.",
            )
        values[name] = table


def _as_json(value: object) -> str:
    """Return a date or time of TOML as JSON writes it."""
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(type(value).__name__)


def first_message(error: ValidationError) -> str:
    """Return what pydantic says of the first thing that is wrong, without what it was given."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # pydantic puts this before the text of our own checks.
    return first["msg"].removeprefix("Value error, ")


def settings_error(path: Path, error: ValidationError) -> SetupError:
    """Return the first thing that is wrong with a configuration file as the error for its author."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    subject = str(path)
    if field:
        subject += f", field {field}"
    plain_messages = {
        "extra_forbidden": "a field that does not exist",
        "missing": "nothing; this field is required",
    }
    return SetupError(
        subject,
        got=plain_messages.get(first["type"], first_message(error)),
        remedy=f"Correct {path.name}, then run it again.",
    )


def save_settings(settings: BaseModel, path: Path, heading: str) -> None:
    """Write `settings` as TOML under a comment; fields that are None are left out."""
    body = tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))
    write_atomic(path, f"# {heading}\n{body}".encode())
