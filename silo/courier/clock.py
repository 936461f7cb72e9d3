"""Compares this machine's clock with the aggregator's: Flower refuses a node whose signature is minutes old."""

import http.client
import ssl
import threading
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from silo.courier.reach import make_connection

# Flower allows 300.
TOLERATED_S = 240.0
_TIMEOUT_S = 3.0


def seconds_ahead(address: str) -> float | None:
    """Return by how many seconds this clock is ahead of the aggregator's, None where that is not known.

    A hint for the operator and nothing else, so that the certificate is not checked: with a wrong clock it may well
    seem expired. Anybody who answers instead of the aggregator can only cause a wrong hint.
    """
    results: list[float | None] = []
    # In a thread with a limit: a server may answer a byte at a time, for ever, and no step would time out.
    thread = threading.Thread(
        target=lambda: results.append(_measure_difference(address)), daemon=True
    )
    thread.start()
    thread.join(2 * _TIMEOUT_S)
    return results[0] if results else None


def _measure_difference(address: str) -> float | None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with suppress(OSError, http.client.HTTPException, ValueError, TypeError, OverflowError):
        connection = make_connection(address, context, _TIMEOUT_S)
        try:
            connection.request("HEAD", "/")
            server_date = str(connection.getresponse().headers["Date"])
            difference = datetime.now(UTC) - parsedate_to_datetime(server_date)
            return difference.total_seconds()
        finally:
            connection.close()
    return None


def describe(ahead_s: float | None) -> str | None:
    """Describe a wrong clock in one sentence; None where it is right, or nothing is known."""
    if ahead_s is None or abs(ahead_s) <= TOLERATED_S:
        return None
    direction = "ahead of" if ahead_s > 0 else "behind"
    difference = _describe_duration(abs(ahead_s))
    return f"this machine's clock is {difference} {direction} the aggregator's; one of the two must be set"


def _describe_duration(seconds: float) -> str:
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 86400:.1f} days"
