"""Code in a place where it was not meant to run: tries to read, to write, to connect, and prints what succeeded.

`python - '{"read": [PATH...], "write": [PATH...], "connect": ["HOST:PORT"...]}' < housebreaker.py` needs no package.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path


def can_read(path: Path) -> bool:
    """Whether a byte of a file, or a name in a folder, can be read."""
    with suppress(OSError):
        if path.is_dir():
            return any(path.iterdir())
        with path.open("rb") as handle:
            return bool(handle.read(1))
    return False


def can_write(path: Path) -> bool:
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


def can_connect(place: str) -> bool:
    """Whether something listens there and answers."""
    host, _, port = place.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def exposed_process_files() -> list[str]:
    """What the worker's processes give away: their environment, their memory's map, their view of the file system."""
    exposed_files = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"--only\0worker" not in (entry / "cmdline").read_bytes():
                continue
            for name in ("environ", "maps"):
                with suppress(OSError):
                    if (entry / name).read_bytes():
                        exposed_files.append(name)
            for name in ("root", "cwd"):
                with suppress(OSError):
                    (entry / name).readlink()
                    exposed_files.append(name)
    return exposed_files


def find_readable_files(names: list[str]) -> list[str]:
    """Files of such names, wherever they lie."""
    readable_files = []
    for folder, _, files in os.walk("/", onerror=None):
        if not folder.startswith(("/proc", "/sys")):
            paths = (Path(folder, name) for name in files if name in names)
            readable_files += [str(path) for path in paths if can_read(path)]
    return readable_files


def main(wanted: dict[str, list[str]]) -> None:
    """Try everything."""
    successes = {
        "read": [path for path in wanted.get("read", []) if can_read(Path(path))],
        "write": [path for path in wanted.get("write", []) if can_write(Path(path))],
        "connect": [place for place in wanted.get("connect", []) if can_connect(place)],
        "processes": exposed_process_files(),
        "find": [],
    }
    if "find" in wanted:
        successes["find"] = find_readable_files(wanted["find"])
    print(json.dumps(successes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
