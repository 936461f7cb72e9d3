"""Verifies what the ServerApp received and answers each submission with a signed receipt or refusal.

The ServerApp can write to the folder of received files, so a submission is first copied to where only this process
writes, and verified there. What the silo did not sign, or what comes out of order, gets no answer: it is thrown away
and fetched again later (`transfer.delivery`), so that nobody else uses up a silo's submissions. A silo that was removed
is refused without opening what came in its name. Once an answer is on disk, the received files are deleted: the
verified copy of an accepted submission stays, and the receipt of a refused one. A submission that screening finds
implausible, or that states more units than agreed, waits in quarantine, unanswered, until a person decides; an empty
folder in `incoming/` marks that it need not be fetched again. A submission that crashes this process is refused after
some attempts (`intake.attempts`). Withdrawals recorded by `aggregator withdraw` are carried out here.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
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
    QuarantineRecord,
    decisions_on,
    is_admitted,
    quarantine_submission,
    quarantined_submissions,
)
from aggregator.membership.registry import (
    active_card,
    check_ledger,
    member_cards,
    read_known_ledger,
    record_ledger,
    signing_key,
)
from aggregator.membership.withdrawal import (
    LEFT_BY_ITSELF,
    finish_withdrawal,
    remaining_silos,
    withdraw_silo,
    withdrawn_silos,
)
from aggregator.transfer.receipts_folder import clear_unsigned, count_unsigned
from ddm.errors import ArchipelagoError, BusyError, PolicyError, RefusedError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import move_into_place, read_bounded, staging_folder, write_atomic
from ddm.io.locks import locked
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import MAX_TEXT, now_utc
from ddm.protocol.leave import LEAVE_NAME, MAX_LEAVE_BYTES
from ddm.protocol.receipt import (
    MAX_RECEIPT_BYTES,
    RECEIPT_KIND,
    AcceptedVerdict,
    HeldVerdict,
    Receipt,
    RefusedVerdict,
)
from ddm.system.escape import escape_control
from ddm.transport.messages import MAX_SUBMISSIONS
from ddm.transport.sequences import sequence_numbers
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey
from ddm.trust.sealed_documents import open_leave_notice

# No silo's name begins so: attempts at what nobody is known to have signed.
_UNSIGNED = "_unsigned"
_log = logging.getLogger(__name__)


class IntakeService:
    """Takes in one plan's submissions.

    Args:
        federation: the operator's folder.
        receipt_key: signs receipts; the plan names it.
        on_verdict: called with every receipt written.
        on_quarantine: called with the record of every submission put into quarantine.
        on_expert: called before each expert that screening measures.
    """

    def __init__(
        self,
        federation: Federation,
        receipt_key: SigningKey,
        on_verdict: Callable[[Receipt], None],
        on_quarantine: Callable[[QuarantineRecord], None] = lambda record: None,
        on_expert: Callable[[], None] = lambda: None,
    ) -> None:
        self.federation = federation
        self.key = receipt_key
        self.on_verdict = on_verdict
        self.on_quarantine = on_quarantine
        self.plan, self.plan_digest = federation.current_plan()
        self.files = PlanFiles.load(self.plan, federation.plan_targets(self.plan.plan_id))
        self.examiner = Examiner(federation, self.plan, on_expert)
        self._silos_removed: set[str] = set()
        self._remaining: frozenset[str] | None = None

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
            FederationFilesError: a file of the federation cannot be used; no submission is answered in that case.
        """
        self._withdraw_silos_that_left()
        self._finish_withdrawals()
        self._remaining = None
        num_answered = self._apply_decisions()
        num_answered += self._take_in_arrivals()
        return num_answered

    def _withdraw_silos_that_left(self) -> None:
        """Withdraw the silos that gave the plan up, if they signed so themselves."""
        withdrawn = withdrawn_silos(self.federation, self.plan)
        for silo_id in set(self.plan.members) - set(withdrawn):
            path = self.federation.incoming / self.plan.plan_id / silo_id / LEAVE_NAME
            # The ServerApp writes here: a link could make this process read a file that only the operator may read.
            if not path.is_file() or path.is_symlink():
                continue
            # The ServerApp can write here, so only the silo's own key counts.
            try:
                card = member_cards(self.federation, self.plan).get(silo_id)
                if card is None:
                    continue
                sealed = read_bounded(path, MAX_LEAVE_BYTES)
                open_leave_notice(
                    sealed,
                    signing_key(card),
                    root_digest=self.plan.root_digest,
                    # Of a carried silo, the plan that it signed for.
                    plan_id=self.plan.origin(silo_id),
                    silo_id=silo_id,
                )
                withdraw_silo(self.federation, silo_id, LEFT_BY_ITSELF, self.key)
                _log.info("[%s] gave the plan up; its experts are excluded from now on", silo_id)
            except BusyError:
                continue  # another command signs: the next step tries again
            except ArchipelagoError as error:
                _log.warning(
                    "[%s] deleted a notice of leaving that the silo did not sign: %s",
                    silo_id,
                    error,
                )
                # The first notice counts (`transfer.delivery`), so that a false one would keep the genuine one out.
                path.unlink()

    def _finish_withdrawals(self) -> None:
        """Carry out the withdrawals on record, once in the life of this process."""
        withdrawn = withdrawn_silos(self.federation, self.plan)
        for silo_id in set(withdrawn) - self._silos_removed:
            finish_withdrawal(
                self.federation, self.plan.plan_id, self.plan_digest, silo_id, self.key
            )
            self._silos_removed.add(silo_id)

    def _apply_decisions(self) -> int:
        """Carry out a person's decisions about submissions in quarantine; return the number of answers signed."""
        num_answered = 0
        for entry in quarantined_submissions(self.federation, self.plan.plan_id):
            if self._apply_decision(entry):
                num_answered += 1
        return num_answered

    def _take_in_arrivals(self) -> int:
        """Answer or quarantine what arrived from each silo, in order; return the number of answers signed."""
        still_quarantined = {
            (entry.record.silo_id, entry.record.sequence)
            for entry in quarantined_submissions(self.federation, self.plan.plan_id)
        }
        num_answered = 0
        for silo_id in self.plan.silos:
            self._conclude(silo_id)
            incoming = self.federation.incoming / self.plan.plan_id / silo_id
            for sequence in sorted(sequence_numbers(incoming)):
                is_quarantined = (silo_id, sequence) in still_quarantined
                if self._take_in(silo_id, incoming / f"{sequence}", is_quarantined=is_quarantined):
                    num_answered += 1
        return num_answered

    def _take_in(self, silo_id: str, path: Path, *, is_quarantined: bool) -> bool:
        """Deal with one folder that arrived; return whether it was answered."""
        sequence = int(path.name)
        answered = sequence_numbers(self._receipts(silo_id), ".json")
        expected_sequence = max(answered, default=0) + 1
        if sequence != expected_sequence or self._final(silo_id).exists():
            # Answered before a crash, or not the silo's turn.
            _discard(path)
            return False
        if not is_quarantined:
            self._answer(silo_id, path)
            self._conclude(silo_id)
        if self._receipt(silo_id, sequence).exists():
            _discard(path)
            return True
        if path.is_dir() and not path.is_symlink():
            # In quarantine: the empty folder marks that the ServerApp need not fetch it again.
            empty_folder(path)
        return False

    def _conclude(self, silo_id: str) -> None:
        """Mark the silo as final if its last answer is final: an acceptance, or the last refusal that there may be."""
        answered = sequence_numbers(self._receipts(silo_id), ".json")
        if not answered or self._final(silo_id).exists():
            return
        last_sequence = max(answered)
        sealed = read_bounded(self._receipt(silo_id, last_sequence), MAX_RECEIPT_BYTES)
        content, _ = open_sealed(sealed, RECEIPT_KIND, self.key.public, MAX_RECEIPT_BYTES)
        receipt = Receipt.parse(content, subject="receipt")
        if isinstance(receipt.verdict, AcceptedVerdict) or last_sequence >= MAX_SUBMISSIONS:
            write_atomic(self._final(silo_id), b"")

    def _apply_decision(self, entry: QuarantineEntry) -> bool:
        """Carry out the decision about a submission in quarantine, if there is one; return whether it was signed."""
        record = entry.record
        was_answered = self._receipt(record.silo_id, record.sequence).exists()
        if not was_answered:
            decisions = decisions_on(self.federation, record.submission_digest)
            # A person may take days; the silo is told so, and does not take the silence for a fault.
            if not decisions:
                self._notify_quarantined(record)
                return False
            # Later decisions only lower the units of a submission that was admitted.
            verdict = self._verdict_of_decision(entry, decisions[0])
            self.sign_receipt(record.silo_id, record.sequence, record.submission_digest, verdict)
        # The receipt is on disk, so that a crash from here on leaves nothing but this folder to remove.
        shutil.rmtree(entry.folder)
        self._conclude(record.silo_id)
        return not was_answered

    def _verdict_of_decision(
        self, entry: QuarantineEntry, decision: QuarantineDecision
    ) -> AcceptedVerdict | RefusedVerdict:
        silo_id = entry.record.silo_id
        sequence = entry.record.sequence
        if decision.verdict == "refused":
            reason = f"submission {sequence}: flagged by screening, then refused by a person: {decision.reason}"
            return RefusedVerdict(code=RefusedError.exit_code, reason=reason)
        folder = entry.submission_folder
        if not folder.is_dir():
            # Accepted before a crash, which came between the rename and the receipt.
            folder = self._accepted(silo_id)
        try:
            expected = self._expectation(silo_id, sequence)
            with self._attempt(silo_id, sequence):
                # Verified again: keys, plan and card may have changed while a person decided.
                verified = self._verify(authenticate(folder, expected), expected)
                self.keep_accepted(silo_id, verified, folder)
        except ArchipelagoError as error:
            return RefusedVerdict(code=error.exit_code, reason=_reason(error, sequence))
        return AcceptedVerdict()

    def _answer(self, silo_id: str, path: Path) -> None:
        """Accept, refuse or quarantine what arrived, if the silo signed it; throw away anything else."""
        sequence = int(path.name)
        # A folder already there was left by a crash, and never answered: an answered one is final.
        shutil.rmtree(self._accepted(silo_id), ignore_errors=True)
        digest = None
        verdict: AcceptedVerdict | RefusedVerdict
        with staging_folder(self._accepted(silo_id)) as part:
            try:
                expected = self._expectation(silo_id, sequence)
                signed = self._copy_signed(path, part, expected)
                if signed is None:
                    return
                digest = signed.digest
                # From here on, whatever goes wrong is an answer to what the silo signed.
                with self._attempt(silo_id, sequence):
                    verified = self._verify(signed, expected)
                    if self._quarantine_if_implausible(verified, sequence, part):
                        return
                    self.keep_accepted(silo_id, verified, part)
                verdict = AcceptedVerdict()
            except ArchipelagoError as error:
                verdict = RefusedVerdict(code=error.exit_code, reason=_reason(error, sequence))
        self.sign_receipt(silo_id, sequence, digest, verdict)

    def _copy_signed(
        self, path: Path, part: Path, expected: Expectation
    ) -> SignedSubmission | None:
        """Copy what arrived to where only this process writes; None where it is not what the silo signed.

        Such a folder is thrown away. One that crashes this process again and again, before its signature is known, is
        not opened any more until the operator deletes the count of attempts.
        """
        silo_id = expected.silo_id
        sequence = expected.sequence
        try:
            with self._attempt(f"{_UNSIGNED}.{silo_id}", sequence):
                copy_tree_bounded(
                    path,
                    part,
                    max_bytes=submission_bytes(self.plan),
                    max_entries=submission_entries(self.plan),
                )
                return authenticate(part, expected)
        except ArchipelagoError as error:
            _log.warning(
                "[%s] submission %d is not what the silo signed; it is deleted and fetched again: %s",
                silo_id,
                sequence,
                error,
            )
            # Fetched again later, after a wait that doubles each time: the channel may carry rubbish for ever.
            count_unsigned(self._receipts(silo_id), sequence)
            _discard(path)
            return None

    def _quarantine_if_implausible(
        self, verified: VerifiedSubmission, sequence: int, folder: Path
    ) -> bool:
        """Move an implausible submission into quarantine, unless a person admitted it."""
        submission = verified.submission
        silo_id = submission.silo_id
        with reading_federation_files():
            # A damaged file of the federation must not look like a fault of the submission.
            self.examiner.check_own_files(silo_id, submission, verified.digest)
            remaining = self._remaining_silos()
            accepted = self.examiner.accepted(remaining)
            admitted = is_admitted(decisions_on(self.federation, verified.digest))
            claims = claim_faults(
                self.federation,
                self.plan,
                silo_id,
                submission.num_units,
                remaining,
            )
        examination = self.examiner.examine(silo_id, submission, verified.digest, folder)
        reasons = [*claims.values(), *self.examiner.faults(examination, accepted)]
        if not reasons or admitted:
            return False
        shown_reasons = reasons[:MAX_REASONS]
        if len(reasons) > MAX_REASONS:
            shown_reasons.append(f"and {len(reasons) - MAX_REASONS} more")
        record = QuarantineRecord(
            plan_id=self.plan.plan_id,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=examination.submission_digest,
            num_units=submission.num_units,
            reasons=tuple(shown_reasons),
            figures=self.examiner.ratios(examination),
            at=now_utc(),
        )
        quarantine_submission(self.federation, record, folder)
        self.on_quarantine(record)
        return True

    def _remaining_silos(self) -> frozenset[str]:
        """Return the silos beside which an expert is screened, read once a step: who may answer is read each time."""
        if self._remaining is None:
            self._remaining = remaining_silos(self.federation, self.plan)
        return self._remaining

    def sign_receipt(
        self,
        silo_id: str,
        sequence: int,
        digest: str | None,
        verdict: AcceptedVerdict | RefusedVerdict,
    ) -> None:
        """Answer a submission for good: the signed receipt on disk is the answer."""
        receipt = self._make_receipt(silo_id, sequence, digest, verdict, now_utc())
        path = self._receipt(silo_id, sequence)
        write_atomic(path, seal(receipt.encode(), RECEIPT_KIND, self.key))
        clear_unsigned(path.parent, sequence)
        self.on_verdict(receipt)

    def _notify_quarantined(self, record: QuarantineRecord) -> None:
        """Let the silo know that a person decides, once."""
        path = self._receipts(record.silo_id) / f"{record.sequence}.held.json"
        if path.exists():
            return
        receipt = self._make_receipt(
            record.silo_id, record.sequence, record.submission_digest, HeldVerdict(), record.at
        )
        write_atomic(path, seal(receipt.encode(), RECEIPT_KIND, self.key))

    def _make_receipt(
        self,
        silo_id: str,
        sequence: int,
        digest: str | None,
        verdict: AcceptedVerdict | RefusedVerdict | HeldVerdict,
        at: datetime,
    ) -> Receipt:
        return Receipt(
            plan_id=self.plan.plan_id,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=digest,
            verdict=verdict,
            at=at,
        )

    def _attempt(self, folder: str, sequence: int) -> AbstractContextManager[None]:
        attempts = SubmissionAttempts(self.federation.attempts / self.plan.plan_id / folder)
        return attempts.attempt(sequence)

    def _expectation(self, silo_id: str, sequence: int) -> Expectation:
        with reading_federation_files():
            card = active_card(self.federation, self.plan, silo_id)
        if card is None:
            raise PolicyError(
                f"silo {silo_id}",
                expected="a silo that takes part in the plan",
                got="a silo that was removed, or enrolled again with another key",
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
            known = read_known_ledger(self.federation, expected.silo_id)
        # A ledger that was reset would spend the same privacy twice.
        chain = verified.submission.ledger.chain
        check_ledger(known, expected.silo_id, self.plan.plan_id, chain)
        return verified

    def keep_accepted(self, silo_id: str, verified: VerifiedSubmission, part: Path) -> None:
        """Keep exactly the verified bytes, by one rename; a folder already there was left by a crash."""
        final = self._accepted(silo_id)
        if part != final:
            if final.exists():
                shutil.rmtree(final)
            move_into_place(part, final)
        chain = verified.submission.ledger.chain
        record_ledger(self.federation, silo_id, self.plan.plan_id, chain)

    def _accepted(self, silo_id: str) -> Path:
        return self.federation.accepted / self.plan.plan_id / silo_id

    def _receipts(self, silo_id: str) -> Path:
        return self.federation.receipts / self.plan.plan_id / silo_id

    def _receipt(self, silo_id: str, sequence: int) -> Path:
        return self._receipts(silo_id) / f"{sequence}.json"

    def _final(self, silo_id: str) -> Path:
        return self._receipts(silo_id) / "final"


def _reason(error: ArchipelagoError, sequence: int) -> str:
    suffix = ""
    if sequence >= MAX_SUBMISSIONS:
        suffix = f"; the last of {MAX_SUBMISSIONS} submissions for a plan"
    # A receipt is signed text, which holds no control characters and is bounded.
    text = escape_control(str(error), one_line=True)
    return text[: MAX_TEXT - len(suffix)] + suffix


def empty_folder(folder: Path) -> None:
    """Delete the contents, which were moved elsewhere, and keep the empty folder as a marker."""
    for path in folder.iterdir():
        _discard(path)


def _discard(path: Path) -> None:
    """Delete an answered submission, so that refused ones do not fill the disk."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
