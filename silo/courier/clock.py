"""Compares this machine's clock with the aggregator's: Flower refuses a node whose signature is minutes old."""

import http.client
import ssl
import threading
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from silo.courier.reach import open_link

TOLERATED_S = 240.0  # Flower allows 300
_TIMEOUT_S = 3.0


def seconds_ahead(address: str) -> float | None:
    """Return by how many seconds this clock is ahead of the aggregator's, None where that cannot be told.

    A hint for the operator and nothing else, so the certificate is not checked: against a wrong clock it may well seem
    expired, and the answer is bounded whoever gives it.
    """
    found: list[float | None] = []
    # Whoever answers may do so a byte at a time, for ever.
    question = threading.Thread(target=lambda: found.append(_ask(address)), daemon=True)
    question.start()
    question.join(2 * _TIMEOUT_S)
    return found[0] if found else None


def _ask(address: str) -> float | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, http.client.HTTPException, ValueError, TypeError, OverflowError):
        connection = open_link(address, context, _TIMEOUT_S)
        try:
            connection.request("HEAD", "/")
            theirs = parsedate_to_datetime(str(connection.getresponse().headers["Date"]))
            return (datetime.now(UTC) - theirs).total_seconds()
        finally:
            connection.close()
    return None


def describe(ahead_s: float | None) -> str | None:
    """Say in one sentence that the clock is wrong; None where it is right, or nothing is known."""
    if ahead_s is None or abs(ahead_s) <= TOLERATED_S:
        return None
    direction = "ahead of" if ahead_s > 0 else "behind"
    return f"this machine's clock is {_span(abs(ahead_s))} {direction} the aggregator's; one of the two must be set"


def _span(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours" if seconds < 129600 else f"{seconds / 86400:.1f} days"
