"""Reads the units that our commands write as systemd does, and the files that a process may reach."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class UnitFile:
    """What a unit file says, each setting as a list of its values, still quoted."""

    settings: dict[str, list[str]]

    @classmethod
    def read(cls, path: Path) -> "UnitFile":
        """Read a unit file; lines that end in a backslash go on."""
        settings: dict[str, list[str]] = {}
        for line in re.sub(r"\\\n", " ", path.read_text("utf-8")).splitlines():
            if line and not line.startswith(("#", "[")):
                name, _, value = line.partition("=")
                settings.setdefault(name, []).append(value.strip())
        return cls(settings)

    def command(self, name: str = "ExecStart") -> list[str]:
        """The words of its command."""
        (line,) = self.settings[name]
        return [word.replace("$$", "$") for word in words_of(line)]

    def words(self, name: str) -> list[str]:
        """The words of a setting that is a list and may be given several times."""
        return [word for line in self.settings.get(name, []) for word in words_of(line)]


def words_of(line: str) -> list[str]:
    """Take a line of a unit apart as `extract_first_word` of systemd does: quotes, backslashes, then specifiers."""
    words = shlex.split(line, posix=True)
    assert not any(re.search(r"%(?!%)", word.replace("%%", "")) for word in words), "a specifier"
    return [word.replace("%%", "%") for word in words]
