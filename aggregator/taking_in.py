"""The intake desk: watches what the ServerApp wrote, verifies it, answers with a signed receipt or refusal.

What arrived lies in a folder that the ServerApp can write to. So a submission is first copied to where only this
process writes, and verified there. Once its answer is on disk, what arrived is thrown away: of an accepted submission
the verified copy stays, of a refused one its receipt.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from aggregator.config import Federation
from aggregator.delivery import MAX_SUBMISSIONS, TOO_LARGE, TOO_MANY
from aggregator.intake import Expectation, Intake, submission_bytes, submission_entries, verify_submission
from aggregator.registry import card_of, check_ledger, remember_ledger, signing_key
from ddm.errors import ArchipelagoError, PolicyError, ReplayError
from ddm.files import copy_tree_bounded, locked, read_bounded, sync_folder, write_atomic
from ddm.plan_files import PlanFiles
from ddm.protocol.base import now_utc
from ddm.protocol.receipt import RECEIPT_KIND, Accepted, Receipt, Refused
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey

MAX_RECEIPT_BYTES = 65536


class IntakeDesk:
    """Takes in one plan's submissions.

    Args:
        federation: the operator's folder.
        receipt_key: signs receipts; the plan names it.
        on_verdict: called with every receipt written.
    """

    def __init__(self, federation: Federation, receipt_key: SigningKey, on_verdict: Callable[[Receipt], None]) -> None:
        self.federation = federation
        self.key = receipt_key
        self.on_verdict = on_verdict
        self.plan, self.plan_digest = federation.current_plan()
        self.files = PlanFiles.load(self.plan, federation.plan_targets(self.plan.plan_id))

    def locked(self) -> AbstractContextManager[None]:
        """Hold intake for one process at a time.

        Raises:
            BusyError: another process takes in for this federation.
        """
        self.federation.accepted.mkdir(parents=True, exist_ok=True)
        return locked(self.federation.accepted, "intake")

    def waiting_for(self) -> list[str]:
        """List the silos of which more is expected."""
        return [silo_id for silo_id in self.plan.silos if not self._final(silo_id).exists()]

    def step(self) -> int:
        """Answer every submission that has no answer yet, and finish what a crash left half done.

        Returns:
            How many were answered.
        """
        answered = 0
        for silo_id in self.plan.silos:
            self._conclude(silo_id)
            for path in self._arrived(silo_id):
                if not self._receipt(silo_id, int(path.stem)).exists():
                    self._answer(silo_id, path)
                    self._conclude(silo_id)
                    answered += 1
                _discard(path)
        return answered

    def _arrived(self, silo_id: str) -> list[Path]:
        """List what arrived, in order: whole submissions, and marks of those that were not fetched."""
        incoming = self.federation.incoming / self.plan.plan_id / silo_id
        found = [path for path in incoming.glob("[0-9]*") if path.stem.isdigit()]
        return sorted(
            (path for path in found if path.suffix in ("", TOO_LARGE, TOO_MANY)), key=lambda path: int(path.stem)
        )

    def _conclude(self, silo_id: str) -> None:
        """Mark the silo as final if its last answer says so: accepted, or refused for the last time."""
        folder = self._final(silo_id).parent
        answered = [int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdigit()]
        if not answered or self._final(silo_id).exists():
            return
        last = max(answered)
        sealed = read_bounded(self._receipt(silo_id, last), MAX_RECEIPT_BYTES)
        receipt = Receipt.parse(
            open_sealed(sealed, RECEIPT_KIND, self.key.public, MAX_RECEIPT_BYTES)[0], subject="receipt"
        )
        if isinstance(receipt.verdict, Accepted) or last > MAX_SUBMISSIONS:
            write_atomic(self._final(silo_id), b"")

    def _answer(self, silo_id: str, path: Path) -> None:
        sequence = int(path.stem)
        part = self._accepted(silo_id).with_suffix(".part")
        digest = None
        verdict: Accepted | Refused
        try:
            self._check_fetched(silo_id, path, sequence)
            shutil.rmtree(part, ignore_errors=True)
            most = submission_entries(self.plan)
            copy_tree_bounded(path, part, max_bytes=submission_bytes(self.plan), most=most)
            taken = self._verify(silo_id, part, sequence)
            digest = taken.digest
            self._keep(silo_id, taken, part)
            verdict = Accepted()
        except ArchipelagoError as error:
            shutil.rmtree(part, ignore_errors=True)
            verdict = Refused(code=error.exit_code, reason=str(error)[:400])
        receipt = Receipt(
            plan_id=self.plan.plan_id,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=digest,
            verdict=verdict,
            at=now_utc(),
        )
        write_atomic(self._receipt(silo_id, sequence), seal(receipt.encode(), RECEIPT_KIND, self.key))
        self.on_verdict(receipt)

    def _check_fetched(self, silo_id: str, path: Path, sequence: int) -> None:
        if self._final(silo_id).exists():
            raise ReplayError(f"submission {sequence}", expected="none after an accepted one", got="another")
        if sequence > MAX_SUBMISSIONS:
            raise PolicyError(f"submission {sequence}", expected=f"at most {MAX_SUBMISSIONS} for a plan", got="more")
        if path.suffix == TOO_LARGE:
            raise PolicyError(f"submission {sequence}", expected="a size within the plan's limits", got="a larger one")

    def _verify(self, silo_id: str, folder: Path, sequence: int) -> Intake:
        expected = Expectation(
            plan=self.plan,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            key=signing_key(card_of(self.federation, silo_id)),
            sequence=sequence,
            files=self.files,
            now=now_utc(),
        )
        taken = verify_submission(folder, expected)
        check_ledger(self.federation, silo_id, self.plan.plan_id, taken.submission.ledger.chain)
        return taken

    def _keep(self, silo_id: str, taken: Intake, part: Path) -> None:
        """Keep the very bytes that were verified, by one rename; what is there was kept before a crash."""
        final = self._accepted(silo_id)
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        sync_folder(final.parent)
        remember_ledger(self.federation, silo_id, self.plan.plan_id, taken.submission.ledger.chain)

    def _accepted(self, silo_id: str) -> Path:
        return self.federation.accepted / self.plan.plan_id / silo_id

    def _receipt(self, silo_id: str, sequence: int) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / f"{sequence}.json"

    def _final(self, silo_id: str) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / "final"


def _discard(path: Path) -> None:
    """Throw away what was answered, so that refused submissions do not fill the disk."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
