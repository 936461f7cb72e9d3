"""Verifies what the ServerApp received and answers each submission with a signed receipt or refusal.

The ServerApp can write to the folder of received files, so a submission is first copied to where only this process
writes, and verified there. Nothing is answered but what the silo signed: what is not, or comes out of order, is thrown
away, and fetched again later (`transfer.delivery`), so that nobody else uses up a silo's submissions. Once an answer is
on disk, the received files are deleted: the verified copy of an accepted submission stays, and the receipt of a refused
one. A submission that screening finds implausible, or that states more units than agreed, waits in quarantine,
unanswered, until a person decides; an empty folder in `incoming/` marks that it need not be fetched again. A submission
that crashes this process is refused after some attempts (`intake.attempts`). Withdrawals recorded by `aggregator
withdraw` are carried out here.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake.attempts import SubmissionAttempts
from aggregator.intake.checks import (
    Expectation,
    SignedSubmission,
    VerifiedSubmission,
    authenticate,
    verify_submission,
)
from aggregator.intake.claims import claim_faults
from aggregator.intake.examination import Examiner
from aggregator.intake.limits import submission_bytes, submission_entries
from aggregator.intake.own_files import reading_federation_files
from aggregator.intake.quarantine import (
    MAX_REASONS,
    QuarantineDecision,
    QuarantineEntry,
    QuarantineReason,
    decision_on,
    is_admitted,
    quarantine_submission,
    quarantined_submissions,
)
from aggregator.membership.registry import (
    check_ledger,
    known_ledger,
    remember_ledger,
    signing_key,
    taking_part,
)
from aggregator.membership.withdrawal import GIVEN_UP, finish_withdrawal, withdraw, withdrawn_silos
from aggregator.transfer.delivery import forget_unsigned, note_unsigned
from ddm.errors import ArchipelagoError, BusyError, PolicyError, RefusedError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import move_into_place, read_bounded, staging_folder, write_atomic
from ddm.io.locks import locked
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import now_utc
from ddm.protocol.leave import LEAVE_NAME, MAX_LEAVE_BYTES
from ddm.protocol.receipt import RECEIPT_KIND, Accepted, Receipt, Refused
from ddm.protocol.receipt import Held as HeldVerdict
from ddm.transport.messages import MAX_SUBMISSIONS
from ddm.transport.sequences import sequences
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey
from ddm.trust.sealed_documents import open_leave_notice

MAX_RECEIPT_BYTES = 65536
# No silo's name begins so: attempts at what nobody is known to have signed.
_UNSIGNED = "_unsigned"
_log = logging.getLogger(__name__)


class IntakeService:
    """Takes in one plan's submissions.

    Args:
        federation: the operator's folder.
        receipt_key: signs receipts; the plan names it.
        on_verdict: called with every receipt written.
        on_set_aside: called with the reasons for every submission put into quarantine.
        on_expert: called before each expert that screening measures.
    """

    def __init__(
        self,
        federation: Federation,
        receipt_key: SigningKey,
        on_verdict: Callable[[Receipt], None],
        on_set_aside: Callable[[QuarantineReason], None] = lambda why: None,
        on_expert: Callable[[], None] = lambda: None,
    ) -> None:
        self.federation = federation
        self.key = receipt_key
        self.on_verdict = on_verdict
        self.on_set_aside = on_set_aside
        self.plan, self.plan_digest = federation.current_plan()
        self.files = PlanFiles.load(self.plan, federation.plan_targets(self.plan.plan_id))
        self.examiner = Examiner(federation, self.plan, on_expert)
        self._gone: set[str] = set()

    def locked(self) -> AbstractContextManager[None]:
        """Lock intake, so that one process at a time takes in submissions.

        Raises:
            BusyError: another process takes in submissions for this federation.
        """
        self.federation.accepted.mkdir(parents=True, exist_ok=True)
        return locked(self.federation.accepted, "intake")

    def step(self) -> int:
        """Answer every submission that has no answer yet, and finish what a crash interrupted.

        Returns:
            The number of submissions answered.

        Raises:
            OwnFilesError: a file of the federation cannot be used; nobody is answered for that.
        """
        self._let_go()
        for silo_id in set(withdrawn_silos(self.federation, self.plan)) - self._gone:
            finish_withdrawal(
                self.federation, self.plan.plan_id, self.plan_digest, silo_id, self.key
            )
            self._gone.add(silo_id)
        answered = sum(
            self._settle(each)
            for each in quarantined_submissions(self.federation, self.plan.plan_id)
        )
        waiting = {
            (each.why.silo_id, each.why.sequence)
            for each in quarantined_submissions(self.federation, self.plan.plan_id)
        }
        for silo_id in self.plan.silos:
            self._conclude(silo_id)
            for path in self._arrived(silo_id):
                is_waiting = (silo_id, int(path.name)) in waiting
                answered += self._take(silo_id, path, is_waiting=is_waiting)
        return answered

    def _let_go(self) -> None:
        """Withdraw the silos that gave the plan up, if they signed so themselves."""
        for silo_id in set(self.plan.silos) - set(withdrawn_silos(self.federation, self.plan)):
            path = self.federation.incoming / self.plan.plan_id / silo_id / LEAVE_NAME
            if not path.is_file() or path.is_symlink():
                continue
            try:
                card = taking_part(self.federation, self.plan).get(silo_id)
                if card is None:
                    continue
                sealed = read_bounded(path, MAX_LEAVE_BYTES)
                open_leave_notice(sealed, signing_key(card), self.plan.plan_id, silo_id)
                withdraw(self.federation, silo_id, GIVEN_UP, self.key)
                _log.info("[%s] gave the plan up, and is left out from now on", silo_id)
            except BusyError:
                continue  # another command signs: the next step tries again
            except ArchipelagoError as error:
                _log.warning(
                    "[%s] word that it gave the plan up is not as the silo signed it: %s",
                    silo_id,
                    error,
                )
                path.unlink()

    def _arrived(self, silo_id: str) -> list[Path]:
        """List what arrived, in order."""
        incoming = self.federation.incoming / self.plan.plan_id / silo_id
        return [incoming / f"{number}" for number in sorted(sequences(incoming))]

    def _take(self, silo_id: str, path: Path, *, is_waiting: bool) -> int:
        """Deal with one folder that arrived; return the answers signed."""
        sequence = int(path.name)
        expected = max(sequences(self._final(silo_id).parent, ".json"), default=0) + 1
        if sequence != expected or self._final(silo_id).exists():
            # Answered before a crash, or not the silo's turn.
            _discard(path)
            return 0
        if not is_waiting:
            self._answer(silo_id, path)
            self._conclude(silo_id)
        if self._receipt(silo_id, sequence).exists():
            _discard(path)
            return 1
        if path.is_dir() and not path.is_symlink():
            _empty(path)
        return 0

    def _conclude(self, silo_id: str) -> None:
        """Mark the silo as final if its last answer is final: an acceptance, or the last refusal that there may be."""
        answered = sequences(self._final(silo_id).parent, ".json")
        if not answered or self._final(silo_id).exists():
            return
        last = max(answered)
        sealed = read_bounded(self._receipt(silo_id, last), MAX_RECEIPT_BYTES)
        receipt = Receipt.parse(
            open_sealed(sealed, RECEIPT_KIND, self.key.public, MAX_RECEIPT_BYTES)[0],
            subject="receipt",
        )
        if isinstance(receipt.verdict, Accepted) or last >= MAX_SUBMISSIONS:
            write_atomic(self._final(silo_id), b"")

    def _settle(self, each: QuarantineEntry) -> int:
        """Carry out the decision about a submission in quarantine, if there is one; return the answers signed."""
        silo_id, sequence = each.why.silo_id, each.why.sequence
        answered = self._receipt(silo_id, sequence).exists()
        if not answered:
            decision = decision_on(self.federation, each.why.submission_digest)
            if decision is None:
                self._tell_held(each)
                return 0
            self._sign(
                silo_id, sequence, each.why.submission_digest, self._carry_out(each, decision)
            )
        shutil.rmtree(each.folder)
        self._conclude(silo_id)
        return int(not answered)

    def _carry_out(self, each: QuarantineEntry, decision: QuarantineDecision) -> Accepted | Refused:
        silo_id, sequence = each.why.silo_id, each.why.sequence
        if decision.verdict == "refused":
            reason = f"submission {sequence}: flagged by screening, then refused by a person: {decision.reason}"
            return Refused(code=RefusedError.exit_code, reason=reason)
        verified = each.submission if each.submission.is_dir() else self._accepted(silo_id)
        try:
            expected = self._expectation(silo_id, sequence)
            with self._attempt(silo_id, sequence):
                self._keep(
                    silo_id, self._verify(authenticate(verified, expected), expected), verified
                )
        except ArchipelagoError as error:
            return Refused(code=error.exit_code, reason=self._reason(error, sequence))
        return Accepted()

    def _answer(self, silo_id: str, path: Path) -> None:
        """Accept, refuse or quarantine what arrived, if the silo signed it; throw away anything else."""
        sequence = int(path.name)
        # A folder already there was left by a crash, and never answered.
        shutil.rmtree(self._accepted(silo_id), ignore_errors=True)
        digest = None
        verdict: Accepted | Refused
        with staging_folder(self._accepted(silo_id)) as part:
            try:
                expected = self._expectation(silo_id, sequence)
                signed = self._signed(path, part, expected)
                if signed is None:
                    return
                digest = signed.digest
                with self._attempt(silo_id, sequence):
                    verified = self._verify(signed, expected)
                    if self._set_aside(verified, sequence, part):
                        return
                    self._keep(silo_id, verified, part)
                verdict = Accepted()
            except ArchipelagoError as error:
                verdict = Refused(code=error.exit_code, reason=self._reason(error, sequence))
        self._sign(silo_id, sequence, digest, verdict)

    def _signed(self, path: Path, part: Path, expected: Expectation) -> SignedSubmission | None:
        """Copy what arrived to where only this process writes; None where it is not what the silo signed.

        Such a folder is thrown away. One that crashes this process again and again, before its signature is known, is
        not opened any more until the operator deletes the count of attempts.
        """
        silo_id, sequence = expected.silo_id, expected.sequence
        most = submission_entries(self.plan)
        try:
            with self._attempt(f"{_UNSIGNED}.{silo_id}", sequence):
                copy_tree_bounded(
                    path, part, max_bytes=submission_bytes(self.plan), max_entries=most
                )
                return authenticate(part, expected)
        except ArchipelagoError as error:
            _log.warning(
                "[%s] submission %d is not as the silo signed it: %s", silo_id, sequence, error
            )
            note_unsigned(self._receipt(silo_id, sequence).parent, sequence)
            _discard(path)
            return None

    def _reason(self, error: ArchipelagoError, sequence: int) -> str:
        last = (
            f"; the last of {MAX_SUBMISSIONS} submissions for a plan"
            if sequence >= MAX_SUBMISSIONS
            else ""
        )
        return str(error)[: 400 - len(last)] + last

    def _set_aside(self, verified: VerifiedSubmission, sequence: int, folder: Path) -> bool:
        """Move an implausible submission into quarantine, unless a person admitted it."""
        silo_id, num_units = verified.submission.silo_id, verified.submission.num_units
        with reading_federation_files():
            self.examiner.trial(silo_id)
            accepted, admitted = (
                self.examiner.accepted(),
                is_admitted(self.federation, verified.digest),
            )
            reasons = list(claim_faults(self.federation, self.plan, silo_id, num_units).values())
        examination = self.examiner.examine(silo_id, verified.submission, verified.digest, folder)
        reasons += self.examiner.faults(examination, accepted)
        if not reasons or admitted:
            return False
        more = [f"and {len(reasons) - MAX_REASONS} more"] if len(reasons) > MAX_REASONS else []
        why = QuarantineReason(
            plan_id=self.plan.plan_id,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=examination.submission_digest,
            num_units=num_units,
            reasons=(*reasons[:MAX_REASONS], *more),
            figures=self.examiner.ratios(examination),
            at=now_utc(),
        )
        quarantine_submission(self.federation, why, folder)
        self.on_set_aside(why)
        return True

    def _sign(
        self, silo_id: str, sequence: int, digest: str | None, verdict: Accepted | Refused
    ) -> None:
        receipt = Receipt(
            plan_id=self.plan.plan_id,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=digest,
            verdict=verdict,
            at=now_utc(),
        )
        write_atomic(
            self._receipt(silo_id, sequence), seal(receipt.encode(), RECEIPT_KIND, self.key)
        )
        forget_unsigned(self._receipt(silo_id, sequence).parent, sequence)
        self.on_verdict(receipt)

    def _tell_held(self, each: QuarantineEntry) -> None:
        """Let the silo know that a person decides, unless it knows."""
        why = each.why
        answer = self._receipt(why.silo_id, why.sequence)
        path = answer.with_name(f"{why.sequence}.held.json")
        if path.exists():
            return
        word = Receipt(
            plan_id=self.plan.plan_id,
            plan_digest=self.plan_digest,
            silo_id=why.silo_id,
            sequence=why.sequence,
            submission_digest=why.submission_digest,
            verdict=HeldVerdict(),
            at=why.at,
        )
        write_atomic(path, seal(word.encode(), RECEIPT_KIND, self.key))

    def _attempt(self, folder: str, sequence: int) -> AbstractContextManager[None]:
        return SubmissionAttempts(self.federation.attempts / self.plan.plan_id / folder).attempt(
            sequence
        )

    def _expectation(self, silo_id: str, sequence: int) -> Expectation:
        with reading_federation_files():
            card = taking_part(self.federation, self.plan).get(silo_id)
        if card is None:
            got = "a silo that was removed, or enrolled anew with another key"
            raise PolicyError(
                f"silo {silo_id}", expected="a silo that takes part in the plan", got=got
            )
        return Expectation(
            plan=self.plan,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            key=signing_key(card),
            sequence=sequence,
            files=self.files,
            now=now_utc(),
        )

    def _verify(self, signed: SignedSubmission, expected: Expectation) -> VerifiedSubmission:
        verified = verify_submission(signed, expected)
        with reading_federation_files():
            known = known_ledger(self.federation, expected.silo_id)
        check_ledger(known, expected.silo_id, self.plan.plan_id, verified.submission.ledger.chain)
        return verified

    def _keep(self, silo_id: str, verified: VerifiedSubmission, part: Path) -> None:
        """Keep exactly the verified bytes, by one rename; a folder already there was left by a crash."""
        final = self._accepted(silo_id)
        if part != final:
            if final.exists():
                shutil.rmtree(final)
            move_into_place(part, final)
        remember_ledger(
            self.federation, silo_id, self.plan.plan_id, verified.submission.ledger.chain
        )

    def _accepted(self, silo_id: str) -> Path:
        return self.federation.accepted / self.plan.plan_id / silo_id

    def _receipt(self, silo_id: str, sequence: int) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / f"{sequence}.json"

    def _final(self, silo_id: str) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id / "final"


def _empty(folder: Path) -> None:
    """Delete the contents, which were moved elsewhere, and keep the empty folder as a marker."""
    for path in folder.iterdir():
        _discard(path)


def _discard(path: Path) -> None:
    """Delete an answered submission, so that refused ones do not fill the disk."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
