"""The intake desk: watches what the ServerApp wrote, verifies it, answers with a signed receipt or refusal.

What arrived lies in a folder that the ServerApp can write to. So a submission is first copied to where only this
process writes, and verified there. Once its answer is on disk, what arrived is thrown away: of an accepted submission
the verified copy stays, of a refused one its receipt. What screening finds implausible waits in quarantine, without an
answer, until a person has decided; in `incoming/` an empty folder says that it need not be fetched again. What kills
this process is not begun with for ever (`intake.attempts`), and what `aggregator withdraw` notes is carried out here.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake.attempts import Attempts
from aggregator.intake.checks import Expectation, Intake, verify_submission
from aggregator.intake.examination import Examiner
from aggregator.intake.limits import submission_bytes, submission_entries
from aggregator.intake.quarantine import (
    MAX_REASONS,
    Decision,
    Held,
    SetAside,
    decision_on,
    held,
    is_admitted,
    set_aside,
)
from aggregator.membership.registry import check_ledger, remember_ledger, signing_key, taking_part
from aggregator.membership.withdrawal import finish_withdrawal, withdrawn_silos
from aggregator.transfer.delivery import MAX_SUBMISSIONS, TOO_LARGE, TOO_MANY
from ddm.errors import ArchipelagoError, PolicyError, RefusedError, ReplayError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import aside, move_into_place, read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import now_utc
from ddm.protocol.receipt import RECEIPT_KIND, Accepted, Receipt, Refused
from ddm.transport.sequences import sequences
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey

MAX_RECEIPT_BYTES = 65536


class IntakeDesk:
    """Takes in one plan's submissions.

    Args:
        federation: the operator's folder.
        receipt_key: signs receipts; the plan names it.
        on_verdict: called with every receipt written.
        on_set_aside: called with what goes into quarantine.
    """

    def __init__(
        self,
        federation: Federation,
        receipt_key: SigningKey,
        on_verdict: Callable[[Receipt], None],
        on_set_aside: Callable[[SetAside], None] = lambda why: None,
    ) -> None:
        self.federation = federation
        self.key = receipt_key
        self.on_verdict = on_verdict
        self.on_set_aside = on_set_aside
        self.plan, self.plan_digest = federation.current_plan()
        self.files = PlanFiles.load(self.plan, federation.plan_targets(self.plan.plan_id))
        self.examiner = Examiner(federation, self.plan)
        self._gone: set[str] = set()

    def locked(self) -> AbstractContextManager[None]:
        """Hold intake for one process at a time.

        Raises:
            BusyError: another process takes in for this federation.
        """
        self.federation.accepted.mkdir(parents=True, exist_ok=True)
        return locked(self.federation.accepted, "intake")

    def step(self) -> int:
        """Answer every submission that has no answer yet, and finish what a crash left half done.

        Returns:
            How many were answered.
        """
        for silo_id in set(withdrawn_silos(self.federation, self.plan)) - self._gone:
            finish_withdrawal(self.federation, self.plan.plan_id, self.plan_digest, silo_id, self.key)
            self._gone.add(silo_id)
        answered = sum(self._settle(each) for each in held(self.federation, self.plan.plan_id))
        waiting = {(each.why.silo_id, each.why.sequence) for each in held(self.federation, self.plan.plan_id)}
        for silo_id in self.plan.silos:
            self._conclude(silo_id)
            for path in self._arrived(silo_id):
                sequence = int(path.stem)
                known = (silo_id, sequence) in waiting or self._receipt(silo_id, sequence).exists()
                if not known:
                    self._answer(silo_id, path)
                    self._conclude(silo_id)
                if self._receipt(silo_id, sequence).exists():
                    answered += not known
                    _discard(path)
                elif path.is_dir() and not path.is_symlink():
                    _empty(path)
        return answered

    def _arrived(self, silo_id: str) -> list[Path]:
        """List what arrived, in order: whole submissions, and marks of those that were not fetched."""
        incoming = self.federation.incoming / self.plan.plan_id / silo_id
        found = [(number, kind) for kind in ("", TOO_LARGE, TOO_MANY) for number in sequences(incoming, kind)]
        return [incoming / f"{number}{kind}" for number, kind in sorted(found)]

    def _conclude(self, silo_id: str) -> None:
        """Mark the silo as final if its last answer says so: accepted, or refused for the last time."""
        answered = sequences(self._final(silo_id).parent, ".json")
        if not answered or self._final(silo_id).exists():
            return
        last = max(answered)
        sealed = read_bounded(self._receipt(silo_id, last), MAX_RECEIPT_BYTES)
        receipt = Receipt.parse(
            open_sealed(sealed, RECEIPT_KIND, self.key.public, MAX_RECEIPT_BYTES)[0], subject="receipt"
        )
        if isinstance(receipt.verdict, Accepted) or last > MAX_SUBMISSIONS:
            write_atomic(self._final(silo_id), b"")

    def _settle(self, each: Held) -> int:
        """Carry out what was decided about a submission in quarantine, if it was; return how many were answered."""
        silo_id, sequence = each.why.silo_id, each.why.sequence
        answered = self._receipt(silo_id, sequence).exists()
        if not answered:
            decision = decision_on(self.federation, each.why.submission_digest)
            if decision is None:
                return 0
            self._sign(silo_id, sequence, each.why.submission_digest, self._carry_out(each, decision))
        shutil.rmtree(each.folder)
        self._conclude(silo_id)
        return int(not answered)

    def _carry_out(self, each: Held, decision: Decision) -> Accepted | Refused:
        silo_id, sequence = each.why.silo_id, each.why.sequence
        if decision.verdict == "refused":
            reason = f"submission {sequence}: set aside at screening, then refused by a person: {decision.reason}"
            return Refused(code=RefusedError.exit_code, reason=reason)
        verified = each.submission if each.submission.is_dir() else self._accepted(silo_id)
        try:
            with self._attempt(silo_id, sequence):
                self._check_fetched(silo_id, each.folder, sequence)
                self._keep(silo_id, self._verify(silo_id, verified, sequence), verified)
        except ArchipelagoError as error:
            return Refused(code=error.exit_code, reason=str(error)[:400])
        return Accepted()

    def _answer(self, silo_id: str, path: Path) -> None:
        """Accept, refuse or set aside what arrived."""
        sequence = int(path.stem)
        digest = None
        verdict: Accepted | Refused
        try:
            self._check_fetched(silo_id, path, sequence)
            # What is there was kept before a crash, and never answered.
            shutil.rmtree(self._accepted(silo_id), ignore_errors=True)
            with aside(self._accepted(silo_id)) as part, self._attempt(silo_id, sequence):
                most = submission_entries(self.plan)
                copy_tree_bounded(path, part, max_bytes=submission_bytes(self.plan), most=most)
                taken = self._verify(silo_id, part, sequence)
                digest = taken.digest
                if self._set_aside(taken, sequence, part):
                    return
                self._keep(silo_id, taken, part)
            verdict = Accepted()
        except ArchipelagoError as error:
            verdict = Refused(code=error.exit_code, reason=str(error)[:400])
        self._sign(silo_id, sequence, digest, verdict)

    def _set_aside(self, taken: Intake, sequence: int, verified: Path) -> bool:
        """Move an implausible submission into quarantine, unless a person admitted it."""
        silo_id = taken.submission.silo_id
        examination = self.examiner.examine(silo_id, taken.submission, taken.digest, verified)
        reasons = self.examiner.faults(examination, self.examiner.accepted())
        if not reasons or is_admitted(self.federation, examination.submission_digest):
            return False
        more = [f"and {len(reasons) - MAX_REASONS} more"] if len(reasons) > MAX_REASONS else []
        why = SetAside(
            plan_id=self.plan.plan_id,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=examination.submission_digest,
            reasons=(*reasons[:MAX_REASONS], *more),
            figures=self.examiner.ratios(examination),
            at=now_utc(),
        )
        set_aside(self.federation, why, verified)
        self.on_set_aside(why)
        return True

    def _sign(self, silo_id: str, sequence: int, digest: str | None, verdict: Accepted | Refused) -> None:
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
            raise ReplayError(f"submission {sequence}", expected="none after an accepted one", got="one more")
        if sequence > MAX_SUBMISSIONS:
            raise PolicyError(
                f"submission {sequence}", expected=f"at most {MAX_SUBMISSIONS} for a plan", got="one more"
            )
        if path.suffix == TOO_LARGE:
            raise PolicyError(f"submission {sequence}", expected="a size within the plan's limits", got="a larger one")

    def _attempt(self, silo_id: str, sequence: int) -> AbstractContextManager[None]:
        return Attempts(self.federation.attempts / self.plan.plan_id / silo_id).attempt(sequence)

    def _verify(self, silo_id: str, folder: Path, sequence: int) -> Intake:
        card = taking_part(self.federation, self.plan).get(silo_id)
        if card is None:
            raise PolicyError(f"silo {silo_id}", expected="one that takes part in the plan", got="one that was removed")
        expected = Expectation(
            plan=self.plan,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            key=signing_key(card),
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
        if part != final:
            if final.exists():
                shutil.rmtree(final)
            move_into_place(part, final)
        remember_ledger(self.federation, silo_id, self.plan.plan_id, taken.submission.ledger.chain)

    def _accepted(self, silo_id: str) -> Path:
        return self.federation.accepted / self.plan.plan_id / silo_id

    def _receipt(self, silo_id: str, sequence: int) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / f"{sequence}.json"

    def _final(self, silo_id: str) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / "final"


def _empty(folder: Path) -> None:
    """Throw away what lies elsewhere by now, and keep the folder's name."""
    for path in folder.iterdir():
        _discard(path)


def _discard(path: Path) -> None:
    """Throw away what was answered, so that refused submissions do not fill the disk."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
