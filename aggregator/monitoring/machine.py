"""Probes this machine for the doctor: clock, database, ports, nginx."""

import http.client
import re
import sqlite3
import subprocess
import urllib.parse
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

from aggregator.config import Federation, FederationSettings
from aggregator.runtime.proxy import address_to_connect, answers, find_nginx
from ddm.errors import SetupError, TransportError
from ddm.system.processes import port_in_use

PortState = Literal["free", "ours", "taken"]
_TIMEOUT_S = 10.0
# A larger database takes long to read, so only its header is checked.
_MAX_DATABASE_BYTES = 256 << 20


def check_database(path: Path) -> None:
    """Check Flower's database, if there is one yet.

    Raises:
        SetupError: it is damaged.
    """
    if not path.exists():
        return
    # One problem is enough to say that the database is damaged.
    query = "PRAGMA quick_check(1)"
    if path.stat().st_size > _MAX_DATABASE_BYTES:
        query = "PRAGMA schema_version"
    # Quoted, since a question mark in the path would begin the URI's options.
    uri = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    try:
        # Read-only, since Flower may be writing; a lock of its own is waited for.
        with closing(sqlite3.connect(uri, uri=True, timeout=2)) as connection:
            (answer,) = connection.execute(query).fetchone()
    except sqlite3.Error as error:
        answer = str(error)
    # The version of the schema is a number; the check answers `ok`.
    if not isinstance(answer, int) and answer != "ok":
        raise SetupError(
            str(path),
            expected="an intact database",
            got=str(answer)[:200],
            remedy=(
                "Stop `aggregator run FED`, move the file away and start it again: Flower makes a new "
                "one, and nothing is lost."
            ),
        )


def clock_of(url: str) -> datetime:
    """Read the time of a web server.

    Args:
        url: the address of the server; only the header of its response is read.

    Raises:
        SetupError: not the URL of a web server.
        TransportError: no response, or one without a date.
    """
    parts = urllib.parse.urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise SetupError(
            "--against", expected="a URL, for example https://www.example.org", got=repr(url[:100])
        )
    connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("HEAD", "/")
        return parsedate_to_datetime(connection.getresponse().headers["Date"]).astimezone(UTC)
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        got = ascii(f"{error}"[:200])[1:-1] or type(error).__name__
        raise TransportError(parts.hostname, expected="a response with a date", got=got) from error
    finally:
        connection.close()


def port_state(federation: Federation, settings: FederationSettings, *, running: bool) -> PortState:
    """Return who holds the federation's port."""
    if running:
        ca_path = federation.path / "tls" / "ca.pem"
        if answers(address_to_connect(settings.host), settings.port, ca_path):
            return "ours"
        return "taken"
    if port_in_use(settings.host, settings.port):
        return "taken"
    return "free"


def nginx_version() -> tuple[int, ...] | None:
    """Return the version of nginx; None if it is not installed.

    Raises:
        SetupError: nginx does not print its version.
    """
    nginx = find_nginx()
    if nginx is None:
        return None
    try:
        # nginx prints its version to standard error.
        output = subprocess.run(
            [str(nginx), "-v"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        ).stderr
    except subprocess.TimeoutExpired:
        output = f"no output within {_TIMEOUT_S:g} s"
    match = re.search(r"nginx/([0-9]+(?:\.[0-9]+)*)", output)
    if match is None:
        raise SetupError(
            str(nginx),
            expected="a version number",
            got=output[:100] or "no output",
            remedy="Run `nginx -v`, and reinstall nginx if it fails.",
        )
    return tuple(int(part) for part in match[1].split(".")[:3])
