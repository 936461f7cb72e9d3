"""What the aggregator says of the plan in force and this silo: that it does not name it, as of one enrolled later.

Nobody signs this, and nothing follows from it but words for the site's operator.
"""

from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import Document, PlanId

_MAX_BYTES = 1024


class UnnamedNote(Document):
    """The plan in force that does not name this silo."""

    plan_id: PlanId


def note_naming(site: Path, plan_id: str, *, named: bool) -> None:
    """Keep which plan does not name this silo, until one does.

    Args:
        site: the site's folder.
        plan_id: the plan in force.
        named: whether it names this silo.
    """
    path = _note_path(site)
    if named:
        path.unlink(missing_ok=True)
    elif read_unnamed_plan(site) != plan_id:
        write_atomic(path, UnnamedNote(plan_id=plan_id).encode())


def read_unnamed_plan(site: Path) -> str | None:
    """Return the plan in force that does not name this silo; None where one does, or nothing is known here."""
    try:
        data = read_bounded(_note_path(site), _MAX_BYTES)
        return UnnamedNote.parse(data, subject="unnamed-plan.json", limit=_MAX_BYTES).plan_id
    except (ArchipelagoError, OSError):
        # The worker's user may not read the courier's folder.
        return None


def _note_path(site: Path) -> Path:
    return site / "courier" / "unnamed-plan.json"
