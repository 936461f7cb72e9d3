"""Pausing a site: its worker stops at the next step and waits, across restarts, until somebody resumes it.

The pause is a file, which `silo pause` writes and `silo resume` removes. A paused worker keeps its state, and the
aggregator sees nothing else of it: the courier stays connected, answers, and hands out what was approved before.
"""

import ctypes
import gc
import logging
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ddm.errors import FormatError, MissingFileError
from ddm.io.files import read_bounded, sync_folder, write_atomic
from ddm.io.locks import is_locked, lock_file
from ddm.protocol.base import Document, ShortText, Time, now_utc
from silo.config import Site
from silo.decisions import DecisionLog, WorkPaused, WorkResumed, current_user

HALTED = "halted"
_MAX_BYTES = 4096
_log = logging.getLogger(__name__)


class Pause(Document):
    """A pause: since when, and who asked for it."""

    format: Literal["archipelago/pause/1"] = "archipelago/pause/1"
    at: Time
    by: ShortText

    @property
    def since(self) -> str:
        """Time and person, in words."""
        return f"{self.at:%Y-%m-%d %H:%M}Z, by {self.by}"


def pause(site: Site) -> Pause:
    """Ask the worker to stop at its next step and to wait; a site that is paused stays so.

    Raises:
        DecisionLogError: the log of decisions is damaged; the work continues.
    """
    # The log first, as with every decision: nothing takes effect that no record names.
    DecisionLog(site).add(WorkPaused())
    earlier = present_pause(site)
    if earlier is not None:
        return earlier
    new = Pause(at=now_utc(), by=current_user())
    write_atomic(_path(site), new.encode(), mode=0o600)
    return new


def resume(site: Site) -> bool:
    """Let the worker continue; return whether the site was paused.

    Raises:
        DecisionLogError: the log of decisions is damaged; the pause continues.
    """
    if not _path(site).exists():
        return False
    DecisionLog(site).add(WorkResumed())
    _path(site).unlink(missing_ok=True)
    sync_folder(site.private)
    return True


def present_pause(site: Site) -> Pause | None:
    """Return the pause that is in force, also where its file is damaged; None where there is none."""
    path = _path(site)
    try:
        return Pause.parse(read_bounded(path, _MAX_BYTES), subject="private/paused.json")
    except MissingFileError:
        return None
    except FormatError:
        # A damaged request still is one: work that somebody stopped must not continue for that.
        return Pause(
            at=datetime.fromtimestamp(int(path.lstat().st_mtime), UTC),
            by="somebody; its file is damaged",
        )


def is_halted(site: Site) -> bool:
    """Whether a worker has stopped its work for a pause, and waits."""
    return is_locked(site.private, HALTED)


class StopSignal:
    """Says when the worker must stop its work: because it is to end, or because the site is paused.

    Args:
        site: this silo's.
        stopping: set when the worker is to end.
    """

    def __init__(self, site: Site, stopping: threading.Event) -> None:
        self._site = site
        self._path = _path(site)
        self._stopping = stopping
        # Kept once it was seen: a pause that is over before the work has stopped still was its reason.
        self._paused = False

    def is_set(self) -> bool:
        """Whether to stop at once."""
        self._paused = self._paused or self._path.exists()
        return self._stopping.is_set() or self._paused

    def is_pause(self) -> bool:
        """Whether the work was interrupted for a pause alone."""
        return self._paused and not self._stopping.is_set()

    def wait_while_paused(self, poll_s: float) -> None:
        """Wait while the site is paused, with as little memory as possible.

        Raises:
            KeyboardInterrupt: the worker is to end.
        """
        self._paused = False
        if not self._path.exists():
            return
        release_memory()
        silo_id = self._site.settings().silo_id
        pause = present_pause(self._site)
        since = f" since {pause.since}" if pause else ""
        _log.info("[%s] paused%s. To go on: silo resume %s", silo_id, since, self._site.path)
        # The lock tells `is_halted` that the work has stopped; the system releases it however this process ends.
        with lock_file(self._site.private / f".{HALTED}.lock"):
            while self._path.exists():
                if self._stopping.wait(poll_s):
                    raise KeyboardInterrupt
        _log.info("[%s] resumed", silo_id)


def release_memory() -> None:
    """Give back to machine and GPU what is no longer used; a GPU keeps the little that torch needs to exist there."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # malloc keeps what was freed for later use; a paused worker may wait for days beside other programs.
    with suppress(OSError, AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def _path(site: Site) -> Path:
    return site.private / "paused.json"
