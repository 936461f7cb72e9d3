"""What the aggregator's last question says about this silo: whether its plan names it, and which code it knows.

Nobody signs this, and nothing follows from it but words for the site's operator, and how long a courier stays.
"""

from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import Document, PlanId
from ddm.transport.messages import Code, StatusQuery

_MAX_BYTES = 1024


class QueryNote(Document):
    """The part of a question that the site keeps.

    Attributes:
        plan_id: the plan in force at the aggregator.
        named: whether it names this silo.
        code: the last that the aggregator heard, see `ddm.transport.messages.Status`.
    """

    plan_id: PlanId
    named: bool
    code: Code


def keep_query(site: Path, query: StatusQuery) -> None:
    """Keep what a question says, for the site's folder `site`."""
    note = QueryNote(plan_id=query.plan_id, named=query.named, code=query.known.code)
    # A question comes every half minute, and seldom says anything new.
    if read_query_note(site) != note:
        write_atomic(_note_path(site), note.encode())


def read_query_note(site: Path) -> QueryNote | None:
    """Return what the last question said; None where there was none, or nothing can be read."""
    try:
        data = read_bounded(_note_path(site), _MAX_BYTES)
        return QueryNote.parse(data, subject="last-query.json", limit=_MAX_BYTES)
    except (ArchipelagoError, OSError):
        # The worker's user may not read the courier's folder.
        return None


def read_unnamed_plan(site: Path) -> str | None:
    """Return the plan in force that does not name this silo; None where one does, or nothing is known here."""
    note = read_query_note(site)
    if note is None or note.named:
        return None
    return note.plan_id


def _note_path(site: Path) -> Path:
    return site / "courier" / "last-query.json"
