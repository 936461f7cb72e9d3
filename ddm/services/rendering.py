"""Fills the templates of services; a value that was not quoted for its place is an error."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ddm.errors import ArchipelagoError, BusyError
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


def render(package: str, name: str, **values: object) -> str:
    """Fill a template.

    Args:
        package: holds it in its folder `services/templates`; what it includes may be in that of `ddm`.
        name: its file.
        values: what it names, unquoted.
    """
    return _environment(package).get_template(name).render(values)


def write_services(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of services into a folder that is new, empty, or holds just these.

    Raises:
        BusyError: the folder holds something else.
    """
    held = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    if strange := held - files.keys():
        expected, got = (
            "a new folder, or the one of an earlier time",
            f"a folder with {sorted(strange)[0]}",
        )
        raise BusyError(
            str(folder), expected=expected, got=got, remedy="Name another folder with --out."
        )
    for name, text in files.items():
        write_atomic(folder / name, text.encode(), mode=0o755 if name.endswith(".sh") else 0o644)


@cache
def _environment(package: str) -> Environment:
    loader = ChoiceLoader(
        [PackageLoader(each, "services/templates") for each in dict.fromkeys((package, "ddm"))]
    )
    made = Environment(
        loader=loader,
        undefined=StrictUndefined,
        finalize=_only_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    filters = {"word": unit_word, "command": command_line, "text": unit_text, "sh": shell_word}
    made.filters |= filters | {"user": user_name, "image": image_name, "codes": exit_codes}
    return made


def _only_quoted(value: object) -> object:
    if not isinstance(value, Quoted):
        raise ArchipelagoError(
            "template", expected="a value with a filter that quotes it", got=type(value).__name__
        )
    return value
