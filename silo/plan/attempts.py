"""Guards an attempt to accept a plan, so that nothing in it ends the worker: an error becomes a refusal.

What reading and checking a plan may raise has no bound: a parser's recursion, an allocation, a library's own error.
Each of these is a reason to refuse the plan, and none to stop. An attempt that took the process with it, as the kernel
does where memory runs out, leaves a note; after `MAX_LOST_ATTEMPTS` of them the plan is refused without another one.
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

MAX_LOST_ATTEMPTS = 3
_MAX_NOTE_BYTES = 4096
# What an operating system reports of this machine rather than of the plan: no room, no rights, a broken disk.
_MACHINE_FAULTS = frozenset(
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


class AcceptanceAttempt(Document):
    """An attempt to accept a plan that has begun.

    Attributes:
        plan_id: the plan.
        num_lost: earlier attempts that ended with their process.
    """

    plan_id: PlanId
    num_lost: Annotated[int, Field(ge=0, le=MAX_LOST_ATTEMPTS)]


@contextmanager
def guard_attempt(site: Site, plan_id: str) -> Iterator[None]:
    """Turn whatever the block raises because of the plan into a refusal.

    Raises:
        ArchipelagoError: what the block found wrong with the plan, in its own words.
        PlanFailedError: the block failed in another way, or took its process with it too often.
        OSError: a fault of this machine, such as a full disk, which says nothing about the plan.
    """
    # One note for each plan: with a common one, another plan would reset the count of this one.
    note_path = site.private / "attempts" / f"{plan_id}.json"
    # A power cut loses an attempt too, so that it takes several lost ones to blame the plan.
    num_lost = _read_lost(note_path, plan_id)
    if num_lost >= MAX_LOST_ATTEMPTS:
        raise PlanFailedError(
            f"plan {plan_id}",
            expected="a plan that can be read and checked here",
            got=f"{num_lost} attempts that each ended the process",
            remedy=f"To try it again, remove private/attempts/{note_path.name} from the site and restart the worker.",
        )
    # The note counts this attempt as lost until it is removed below, which a killed process never does.
    attempt = AcceptanceAttempt(plan_id=plan_id, num_lost=num_lost + 1)
    write_atomic(note_path, attempt.encode())
    try:
        yield
    except ArchipelagoError as error:
        # A library's error that was wrapped as one of the configuration may hide a full disk.
        cause = error.__cause__
        if isinstance(error, SetupError) and isinstance(cause, OSError):
            if cause.errno in _MACHINE_FAULTS:
                raise cause from error
        raise
    except OSError as error:
        if error.errno in _MACHINE_FAULTS:
            raise
        raise _failure(plan_id, error) from error
    except Exception as error:
        raise _failure(plan_id, error) from error
    finally:
        note_path.unlink(missing_ok=True)


def _read_lost(note_path: Path, plan_id: str) -> int:
    """Return how many attempts at this plan ended with their process."""
    if not note_path.exists():
        return 0
    try:
        data = read_bounded(note_path, _MAX_NOTE_BYTES)
        attempt = AcceptanceAttempt.parse(data, subject=note_path.name)
    # A damaged note must not keep a plan out for ever; the count starts again.
    except DocumentError:
        return 0
    if attempt.plan_id != plan_id:
        return 0
    return attempt.num_lost


def _failure(plan_id: str, error: Exception) -> PlanFailedError:
    _log.error("plan %s could not be read or checked", plan_id, exc_info=error)
    return PlanFailedError(
        f"plan {plan_id}",
        expected="a plan that can be read and checked here",
        got=f"{type(error).__name__} while it was read or checked",
    )
