"""Writes the waiver of an audit that cannot tell into policy.toml, for one plan and until a day."""

import re
from datetime import UTC, datetime, time
from pathlib import Path

import tomli_w

from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.io.modes import open_to_group
from ddm.io.settings import MAX_SETTINGS_BYTES, load_settings
from ddm.protocol.submission import Waiver
from silo.config import Policy, Site

_TABLE = re.compile(
    r"^[ \t]*\[[ \t]*audit[ \t]*\.[ \t]*waiver[ \t]*\][^\n]*\n(?:(?![ \t]*\[)[^\n]*\n)*",
    re.MULTILINE,
)


def write_waiver(site: Site, waiver: Waiver) -> None:
    """Put a waiver into policy.toml, in place of any that is there; everything else in the file stays as it is.

    Raises:
        SetupError: the file holds its waiver in a form that this cannot replace.
    """
    path = site.path / "policy.toml"
    before, text = site.policy(), path.read_text("utf-8")
    written = with_waiver(text, waiver)
    aside = path.with_name(".policy.toml.new")
    try:
        write_atomic(aside, written.encode())
        wanted = before.model_copy(
            update={"audit": before.audit.model_copy(update={"waiver": waiver})}
        )
        if len(written.encode()) > MAX_SETTINGS_BYTES or _read(aside) != wanted:
            remedy = "Remove audit.waiver from policy.toml by hand, then run it again."
            expected = "a policy.toml with its waiver, if any, in a table [audit.waiver]"
            raise SetupError(str(path), expected=expected, got="another form", remedy=remedy)
        open_to_group(aside, site.path)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def with_waiver(text: str, waiver: Waiver) -> str:
    """Return the text of a policy with this waiver as its last table."""
    rest = _TABLE.sub("", text.rstrip("\n") + "\n")
    table = tomli_w.dumps({"audit": {"waiver": waiver.model_dump(mode="json")}})
    return f"{rest.rstrip()}\n\n{table}"


def end_of(text: str) -> datetime:
    """Read until when a waiver is in force: the end of a day (UTC), or a time with its zone.

    Raises:
        SetupError: it is neither.
    """
    try:
        found = datetime.fromisoformat(text)
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            return datetime.combine(found.date(), time(23, 59, 59), UTC)
    except ValueError:
        found = datetime.min
    if found.tzinfo is None:
        expected = "a day such as 2027-03-31, or a time with its zone such as 2027-03-31T12:00:00Z"
        raise SetupError("--until", expected=expected, got=ascii(text[:40]))
    return found


def _read(path: Path) -> Policy | None:
    try:
        return load_settings(Policy, path)
    except SetupError:
        return None
