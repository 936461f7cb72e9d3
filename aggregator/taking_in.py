"""The intake desk: watches what the ServerApp wrote, verifies it, answers with a signed receipt or refusal."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake import Expectation, Intake, verify_submission
from aggregator.registry import card_of, check_ledger, remember_ledger, signing_key
from ddm.errors import ArchipelagoError, PolicyError, ReplayError
from ddm.files import link_or_copy, locked, sync_folder, write_atomic
from ddm.plan_files import PlanFiles, release_noise_level
from ddm.protocol.base import now_utc
from ddm.protocol.receipt import RECEIPT_KIND, Accepted, Receipt, Refused
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey

TOO_LARGE = ".toolarge"


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
        files = PlanFiles.load(self.plan, federation.plan_targets(self.plan.plan_id))
        self.t_release = release_noise_level(self.plan, files.sketch)

    def locked(self) -> AbstractContextManager[None]:
        """Hold intake for one process at a time.

        Raises:
            BusyError: another process takes in for this federation.
        """
        self.federation.accepted.mkdir(parents=True, exist_ok=True)
        return locked(self.federation.accepted, "intake")

    def waiting_for(self) -> list[str]:
        """List the silos without an accepted submission."""
        return [silo_id for silo_id in self.plan.silos if not self._final(silo_id).exists()]

    def step(self) -> int:
        """Answer every submission that has no answer yet; return how many were answered."""
        answered = 0
        for silo_id in self.plan.silos:
            for folder in self._unanswered(silo_id):
                self._answer(silo_id, folder)
                answered += 1
        return answered

    def _unanswered(self, silo_id: str) -> list[Path]:
        """List what arrived without an answer: whole submissions, and marks of those too large to fetch."""
        incoming = self.federation.incoming / self.plan.plan_id / silo_id
        arrived = [path for path in incoming.glob("[0-9]*") if path.stem.isdigit() and path.suffix in ("", TOO_LARGE)]
        return sorted(
            (path for path in arrived if not self._receipt(silo_id, int(path.stem)).exists()),
            key=lambda path: int(path.stem),
        )

    def _answer(self, silo_id: str, folder: Path) -> None:
        sequence = int(folder.stem)
        digest = None
        verdict: Accepted | Refused
        try:
            taken = self._verify(silo_id, folder, sequence)
            digest = taken.digest
            self._keep(silo_id, taken)
            verdict = Accepted()
        except ArchipelagoError as error:
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
        if isinstance(verdict, Accepted):
            write_atomic(self._final(silo_id), b"")
        self.on_verdict(receipt)

    def _verify(self, silo_id: str, folder: Path, sequence: int) -> Intake:
        if self._final(silo_id).exists():
            raise ReplayError(f"submission {sequence}", expected="none after an accepted one", got="another")
        if folder.suffix == TOO_LARGE:
            raise PolicyError(f"submission {sequence}", expected="a size within the plan's limits", got="a larger one")
        expected = Expectation(
            plan=self.plan,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            key=signing_key(card_of(self.federation, silo_id)),
            sequence=sequence,
            t_release=self.t_release,
            now=now_utc(),
        )
        taken = verify_submission(folder, expected)
        check_ledger(self.federation, silo_id, taken.submission.ledger.chain)
        return taken

    def _keep(self, silo_id: str, taken: Intake) -> None:
        """Keep the very bytes that were verified, aside first and then by one rename."""
        final = self.federation.accepted / self.plan.plan_id / silo_id
        part = final.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        for name, path in taken.files.items():
            link_or_copy(path, part / name)
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        sync_folder(final.parent)
        remember_ledger(self.federation, silo_id, taken.submission.ledger.chain)

    def _receipt(self, silo_id: str, sequence: int) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / f"{sequence}.json"

    def _final(self, silo_id: str) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / "final"
