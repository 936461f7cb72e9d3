"""Writes the waiver of an inconclusive audit into policy.toml, for one plan and until a day."""

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

# The header of the table, and every line up to the next header or the end of the file.
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
    policy = site.policy()
    audit = policy.audit.model_copy(update={"waiver": waiver})
    expected_policy = policy.model_copy(update={"audit": audit})
    # As text, since a TOML writer would drop the comments of the one who keeps this policy.
    data = with_waiver(path.read_text("utf-8"), waiver).encode()
    new_path = path.with_name(".policy.toml.new")
    try:
        write_atomic(new_path, data)
        # The text is edited by a pattern, which may miss another way to write the table: what the new file means is
        # compared with what it must mean before it takes the place of the old one.
        if len(data) > MAX_SETTINGS_BYTES or _read_policy(new_path) != expected_policy:
            raise SetupError(
                str(path),
                expected="a policy.toml with its waiver, if any, in a table [audit.waiver]",
                got="another form",
                remedy="Remove audit.waiver from policy.toml by hand, then run it again.",
            )
        # Permissions belong to the file that is replaced, and the courier's user may read the policy through its
        # group.
        open_to_group(new_path, site.path)
        new_path.replace(path)
    finally:
        new_path.unlink(missing_ok=True)


def with_waiver(text: str, waiver: Waiver) -> str:
    """Return the text of a policy with this waiver as its last table."""
    other_tables = _TABLE.sub("", text.rstrip("\n") + "\n")
    fields = waiver.model_dump(mode="json")
    table = tomli_w.dumps({"audit": {"waiver": fields}})
    return f"{other_tables.rstrip()}\n\n{table}"


def parse_end(text: str) -> datetime:
    """Read until when a waiver is in force: the end of a day (UTC), or a time with its zone.

    Raises:
        SetupError: it is neither.
    """
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        end = None
    if end is not None and re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        last_second = time(23, 59, 59)
        return datetime.combine(end.date(), last_second, UTC)
    # Without a zone, an end would mean different times on different machines.
    if end is None or end.tzinfo is None:
        raise SetupError(
            "--until",
            expected="a day such as 2027-03-31, or a time with its zone such as 2027-03-31T12:00:00Z",
            got=ascii(text[:40]),
        )
    return end


def _read_policy(path: Path) -> Policy | None:
    """Read a policy; None where it is not one."""
    try:
        return load_settings(Policy, path)
    except SetupError:
        return None
