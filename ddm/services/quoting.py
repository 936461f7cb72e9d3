"""Quotes values for the files of a service, each in the language of its place; what cannot be quoted is refused.

A path of an operator may hold blanks, umlauts, quotes, percent signs. What it may not hold has no quotation that
systemd and podman both understand: control characters, and in a mount a comma or a colon.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from ddm.errors import SetupError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[A-Za-z0-9_@./:=,+-]+")
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9_.:/@-]{0,254}")


class Quoted(str):
    """Text that is quoted for its place; a template takes nothing else."""

    __slots__ = ()


def unit_word(value: object) -> Quoted:
    """Quote one word of a list in a unit: quotes and backslashes escaped, no specifier expanded."""
    # Backslashes first, since the quotes' own must not be doubled. systemd reads a percent sign as a specifier even
    # inside quotes.
    text = _checked(value).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return Quoted(text)
    return Quoted(f'"{text}"')


def command_word(value: object) -> Quoted:
    """Quote one word of a command in a unit, where a dollar sign would name a variable too."""
    return Quoted(unit_word(value).replace("$", "$$"))


def command_line(words: Iterable[object]) -> Quoted:
    """Quote a command of a unit, with a line for each mount."""
    text = ""
    follows_mount = False
    for word in map(command_word, words):
        is_mount = word.lstrip('"').startswith("--mount=")
        # A backslash at its end continues the line.
        separator = " \\\n  " if is_mount or follows_mount else " "
        text += separator + word
        follows_mount = is_mount
    return Quoted(text.lstrip())


def unit_text(value: object) -> Quoted:
    """Return free text of a unit that runs to the end of its line, such as a description."""
    return Quoted(_checked(value).replace("\\", "\\\\").replace("%", "%%"))


def shell_word(value: object) -> Quoted:
    """Quote one word of a shell script."""
    return Quoted(shlex.quote(_checked(value)))


def exit_codes(codes: Iterable[int]) -> Quoted:
    """Return a list of exit codes."""
    return Quoted(" ".join(str(int(code)) for code in codes))


def user_name(value: object) -> Quoted:
    """Return the name of a user or a group of the machine.

    Raises:
        SetupError: it could be read as more than a name.
    """
    expected = "a user's or a group's name: a-z or _, then up to 30 of a-z, 0-9, _ and -"
    return Quoted(_matching(_NAME, value, expected))


def image_name(value: object) -> Quoted:
    """Return the name of a container image.

    Raises:
        SetupError: it could be read as more than a name.
    """
    return Quoted(_matching(_IMAGE, value, "an image's name, such as localhost/archipelago:0.1.0"))


def mount(path: Path, *, writable: bool = False) -> str:
    """Return podman's option that shows a file or folder of the machine at the same path inside a container.

    Raises:
        SetupError: the path holds a comma or a colon, which podman cannot tell from the option's own.
    """
    for sign in ",:":
        if sign in str(path):
            raise SetupError(
                str(path),
                expected="a path without , and :",
                got=f"one with {sign}",
                remedy="Move it to a path without these, or run the site as services of two users: --kind systemd.",
            )
    read_only = "false" if writable else "true"
    return f"--mount=type=bind,src={path},dst={path},ro={read_only}"


def _matching(pattern: re.Pattern[str], value: object, expected: str) -> str:
    text = str(value)
    # Not `match`, which would accept a name with a line break and more after it.
    if not pattern.fullmatch(text):
        raise SetupError(repr(text[:64]), expected=expected, got="other characters")
    return text


def _checked(value: object) -> str:
    text = str(value)
    # A line break would end the line of a setting and begin another one.
    if _CONTROL.search(text) or not text or not text.isprintable():
        raise SetupError(
            repr(text[:200]),
            expected="printable text",
            got="text with characters that cannot be printed",
            remedy="Move it to a path that can be printed.",
        )
    return text
