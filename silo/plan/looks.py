"""Looks at a received plan so that nothing in it ends the worker: an error becomes a refusal, a lost process counts.

What a look may raise has no bound: a parser's recursion, an allocation, a library's own error. Each of these is a
reason to refuse the plan, and none to stop. A look that took the process with it, as the kernel does where memory runs
out, leaves a note; after `MOST_LOST` of them the plan is refused without another look.
"""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ddm.errors import ArchipelagoError, DocumentError, PlanFailedError, SetupError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import Document, PlanId
from silo.config import Site

MOST_LOST = 3
_MAX_NOTE_BYTES = 4096
# What an operating system says of this machine rather than of the plan: no room, no rights, a broken disk.
_OWN_FAULTS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
    }
)
_log = logging.getLogger(__name__)


class Look(Document):
    """A look at a plan that has begun.

    Attributes:
        plan_id: the plan.
        lost: earlier looks at it that ended with their process.
    """

    plan_id: PlanId
    lost: Annotated[int, Field(ge=0, le=MOST_LOST)]


@contextmanager
def look_at(site: Site, plan_id: str) -> Iterator[None]:
    """Turn whatever the block raises because of the plan into a refusal.

    Raises:
        ArchipelagoError: what the block found wrong with the plan, in its own words.
        PlanFailedError: the block failed in another way, or took its process with it too often.
        OSError: a fault of this machine, such as a full disk, which says nothing about the plan.
    """
    # of each plan, lest another one makes this one be forgotten
    note = site.private / "looks" / f"{plan_id}.json"
    lost = _lost(note, plan_id)
    if lost >= MOST_LOST:
        remedy = f"To look at it again, remove private/looks/{note.name} from the site and restart the worker."
        got = f"{lost} looks at it that each ended the process"
        raise PlanFailedError(
            f"plan {plan_id}", expected="a plan that can be looked at", got=got, remedy=remedy
        )
    write_atomic(note, Look(plan_id=plan_id, lost=lost + 1).encode())
    try:
        yield
    except ArchipelagoError as error:
        fault = error.__cause__ if isinstance(error, SetupError) else None
        if isinstance(fault, OSError) and fault.errno in _OWN_FAULTS:
            raise fault from error
        raise
    except OSError as error:
        if error.errno in _OWN_FAULTS:
            raise
        raise _failed(plan_id, error) from error
    except Exception as error:
        raise _failed(plan_id, error) from error
    finally:
        note.unlink(missing_ok=True)


def _lost(note: Path, plan_id: str) -> int:
    """Return how many looks at this plan ended with their process."""
    if not note.exists():
        return 0
    try:
        look = Look.parse(read_bounded(note, _MAX_NOTE_BYTES), subject=note.name)
    except DocumentError:
        return 0
    return look.lost if look.plan_id == plan_id else 0


def _failed(plan_id: str, error: Exception) -> PlanFailedError:
    _log.error("plan %s could not be read or checked", plan_id, exc_info=error)
    expected, got = "a plan that can be read and checked here", f"{type(error).__name__} on the way"
    return PlanFailedError(f"plan {plan_id}", expected=expected, got=got)
