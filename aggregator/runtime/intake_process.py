"""The process that takes in what arrives, apart from Flower's, so that neither can bring the other down.

`python -m aggregator.runtime.intake_process FED PLAN`; the passphrase of the receipts key comes on standard
input and is kept nowhere else. `aggregator run` starts it, shows what it prints, and starts it again when it
dies or hangs.
"""

import logging
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from aggregator.config import Federation
from aggregator.intake.limits import submission_bytes
from aggregator.intake.own_files import FederationFilesError
from aggregator.intake.quarantine import QuarantineRecord
from aggregator.intake.service import IntakeService
from ddm.errors import BusyError
from ddm.protocol.receipt import AcceptedVerdict, Receipt, RefusedVerdict
from ddm.publishing.keys import load_key
from ddm.system.console import new_app, run_app
from ddm.system.secrecy import forbid_core_dumps

HEARTBEAT = "intake.alive"
_CHECK_S = 1.0
_HEARTBEAT_S = 5.0
# After the disk, or one of our own files, refused a step.
_REFUSED_S = 30.0
# How long one step, or the screening of one expert, may take; a slow disk copies and hashes at this rate.
_STEP_S = 3600.0
_BYTES_PER_S = 10_000_000
_MAX_PASSPHRASE_BYTES = 4096
_log = logging.getLogger("aggregator.runtime.intake_process")  # __name__ is __main__ here

app = new_app("Take in a federation's submissions; the passphrase comes on standard input.")


class HeartbeatThread(threading.Thread):
    """Touches the heartbeat while the work makes progress: a step may take long, but not for ever.

    Args:
        path: the heartbeat file.
        limit_s: how long one step may take.
    """

    def __init__(self, path: Path, limit_s: float = _STEP_S) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.limit_s = limit_s
        self._step_began_at = time.monotonic()

    def step(self) -> None:
        """Note that the next step begins, or the screening of another expert."""
        self._step_began_at = time.monotonic()

    def run(self) -> None:
        """Beat until the process ends."""
        while True:
            if time.monotonic() - self._step_began_at < self.limit_s:
                with suppress(OSError):
                    self._path.touch()
            time.sleep(_HEARTBEAT_S)


@app.command()
def take_in(
    fed: Annotated[Path, typer.Argument(help="The federation's folder.")],
    plan_id: Annotated[str, typer.Argument(help="The plan that must be the current one.")],
) -> None:
    """Answer every submission that arrives until a signal interrupts at once, which does not count as an attempt."""
    federation = Federation(fed).require()
    # Not an argument or a variable, which other processes of the machine could read.
    key = load_key(federation, "receipts", sys.stdin.buffer.read(_MAX_PASSPHRASE_BYTES))
    heartbeat = HeartbeatThread(federation.path / "flower" / HEARTBEAT)
    intake = IntakeService(federation, key, _log_verdict, _log_quarantine, heartbeat.step)
    # `aggregator run` carries one plan until it ends. Intake reads the current one, which may have been signed since.
    if intake.plan.plan_id != plan_id:
        raise BusyError(
            f"plan {intake.plan.plan_id}",
            expected=f"plan {plan_id}",
            got="a plan that was signed later",
            remedy=(
                "Nothing to do: `aggregator run FED` carries out the newer plan when it is started "
                "again."
            ),
        )
    max_bytes = submission_bytes(intake.plan) * len(intake.plan.silos)
    with intake.locked(), suppress(KeyboardInterrupt):
        # A single step may copy and hash all silos' submissions at once.
        heartbeat.limit_s += max_bytes / _BYTES_PER_S
        heartbeat.start()
        while True:
            heartbeat.step()
            time.sleep(_step(intake))


def _step(intake: IntakeService) -> float:
    """Answer what is there; return how long to wait until the next look."""
    try:
        intake.step()
    except OSError as error:
        # A full disk: what arrived stays where it is.
        _log.warning("intake waits: %s", error.strerror or type(error).__name__)
        return _REFUSED_S
    except FederationFilesError as error:
        _log.error("intake waits, and answers nobody, until this is corrected: %s", error)
        return _REFUSED_S
    return _CHECK_S


def _log_verdict(receipt: Receipt) -> None:
    match receipt.verdict:
        case AcceptedVerdict():
            _log.info("[%s] submission %d accepted", receipt.silo_id, receipt.sequence)
        case RefusedVerdict() as refusal:
            _log.warning(
                "[%s] submission %d REFUSED: %s", receipt.silo_id, receipt.sequence, refusal.reason
            )


def _log_quarantine(record: QuarantineRecord) -> None:
    reasons = "; ".join(record.reasons)
    _log.warning(
        "[%s] submission %d waits for you: %s (aggregator quarantine)",
        record.silo_id,
        record.sequence,
        reasons,
    )


if __name__ == "__main__":
    # It holds the key of receipts.
    forbid_core_dumps()
    run_app(app)
