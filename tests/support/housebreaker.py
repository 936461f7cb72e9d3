"""Code in a place where it was not meant to run: tries to read, to write, to connect, and prints what succeeded.

`python - '{"read": [PATH...], "write": [PATH...], "connect": ["HOST:PORT"...]}' < housebreaker.py` needs no package.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path


def read(path: Path) -> bool:
    """Whether a byte of a file, or a name in a folder, can be read."""
    with suppress(OSError):
        if path.is_dir():
            return any(path.iterdir())
        with path.open("rb") as handle:
            return bool(handle.read(1))
    return False


def write(path: Path) -> bool:
    """Whether a file can be changed, or one made in a folder; nothing stays changed."""
    with suppress(OSError):
        if path.is_dir():
            made = path / "housebreaker"
            made.touch()
            made.unlink()
        else:
            with path.open("ab"):
                pass
        return True
    return False


def connect(place: str) -> bool:
    """Whether something listens there and answers."""
    host, _, port = place.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def processes() -> list[str]:
    """What the worker's processes give away: their environment, their memory's map, their view of the file system."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"--only\0worker" not in (entry / "cmdline").read_bytes():
                continue
            for name in ("environ", "maps"):
                with suppress(OSError):
                    found += [name] if (entry / name).read_bytes() else []
            for name in ("root", "cwd"):
                with suppress(OSError):
                    found += [name] if (entry / name).readlink() else []
    return found


def find(names: list[str]) -> list[str]:
    """Files of such names, wherever they lie."""
    found = []
    for folder, _, files in os.walk("/", onerror=None):
        if not folder.startswith(("/proc", "/sys")):
            found += [
                str(Path(folder, each))
                for each in files
                if each in names and read(Path(folder, each))
            ]
    return found


def main(wanted: dict[str, list[str]]) -> None:
    """Try everything."""
    got = {
        "read": [each for each in wanted.get("read", []) if read(Path(each))],
        "write": [each for each in wanted.get("write", []) if write(Path(each))],
        "connect": [each for each in wanted.get("connect", []) if connect(each)],
        "processes": processes(),
        "find": find(wanted["find"]) if "find" in wanted else [],
    }
    print(json.dumps(got))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
