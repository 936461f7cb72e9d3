"""What the doctor asks of this machine: its clock, its memory, its ports, the programs installed on it."""

import http.client
import importlib.metadata
import re
import sqlite3
import subprocess
import urllib.parse
from contextlib import closing, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

from aggregator.config import Federation, FederationSettings
from aggregator.runtime.proxy import answers, find_nginx
from ddm.errors import SetupError, TransportError
from ddm.system.processes import port_in_use

_TIMEOUT_S = 10.0
# Beyond this a whole database takes long to read; then only its head is.
_MAX_DATABASE_BYTES = 256 << 20


def check_database(path: Path) -> None:
    """Check Flower's database, if there is one yet.

    Raises:
        SetupError: it is damaged.
    """
    if not path.exists():
        return
    question = "PRAGMA quick_check(1)" if path.stat().st_size <= _MAX_DATABASE_BYTES else "PRAGMA schema_version"
    try:
        with closing(sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?mode=ro", uri=True, timeout=2)) as opened:
            (answer,) = opened.execute(question).fetchone()
    except sqlite3.Error as error:
        answer = str(error)
    if not isinstance(answer, int) and answer != "ok":
        remedy = "Stop aggregator run, move the file away and run again: Flower makes another, and nothing is lost."
        raise SetupError(str(path), expected="a whole database", got=str(answer)[:200], remedy=remedy)


def clock_of(url: str) -> datetime:
    """Ask a web server what time it is.

    Args:
        url: where to; only the head of the answer is read.

    Raises:
        SetupError: not the URL of a web server.
        TransportError: no answer, or one without a date.
    """
    parts = urllib.parse.urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise SetupError("--against", expected="a URL, for example https://www.example.org", got=repr(url[:100]))
    connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("HEAD", "/")
        return parsedate_to_datetime(connection.getresponse().headers["Date"]).astimezone(UTC)
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        raise TransportError(parts.hostname, expected="an answer with a date", got=str(error)[:200]) from error
    finally:
        connection.close()


def port_state(
    federation: Federation, settings: FederationSettings, *, running: bool
) -> Literal["free", "ours", "taken"]:
    """Say who holds the federation's port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    if running:
        return "ours" if answers(host, settings.port, federation.path / "tls" / "ca.pem") else "taken"
    return "taken" if port_in_use(settings.host, settings.port) else "free"


def nginx_version() -> tuple[int, ...] | None:
    """Ask nginx for its version; None where there is none."""
    nginx = find_nginx()
    if nginx is None:
        return None
    try:
        said = subprocess.run(
            [str(nginx), "-v"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        ).stderr
    except subprocess.TimeoutExpired:
        said = "no answer"
    found = re.search(r"nginx/([0-9]+(?:\.[0-9]+)*)", said)
    if not found:
        raise SetupError(str(nginx), expected="its version", got=said[:100] or "nothing")
    return _version(found[1])


def flower_versions() -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return Flower's version, and the bounds that this package's own description sets."""
    try:
        version = importlib.metadata.version("flwr")
        wanted = next(each for each in importlib.metadata.requires("archipelago") or [] if each.startswith("flwr"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        return None
    low, high = re.search(r">=([0-9.]+)", wanted), re.search(r"<([0-9.]+)", wanted)
    return _version(version), _version(low[1] if low else "0"), _version(high[1] if high else "9999")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def memory_free() -> int | None:
    """Return what is available: of the machine, or of the container if that is less."""
    free: list[int] = []
    with suppress(OSError, ValueError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free += [int(found[1]) * 1024] if found else []
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(free, default=None)
