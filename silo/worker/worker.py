"""The worker: takes one plan from the inbox to the outbox, one durable state at a time, without a network."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ddm.errors import ArchipelagoError, BusyError, DataError, SubmissionRefusedError
from ddm.io.files import write_for_group
from ddm.io.locks import locked
from ddm.privacy.plan_cost import Kind, mechanisms
from ddm.protocol.base import now_utc
from ddm.protocol.receipt import Receipt, Refused, Withdrawn
from ddm.protocol.submission import submission_path
from ddm.trust.keys import SigningKey
from silo.config import Isolation, Site
from silo.data.captions import check_encoder, keep_texts
from silo.data.cohort import Cohort
from silo.data.latents import keep_latents, pixels_of, training_inputs
from silo.plan.acceptance import AcceptedPlan, bundle_mark, load_accepted, receive_plan, waiting_plans
from silo.plan.consent import is_accepted, may_begin
from silo.plan.own_experts import own_experts
from silo.plan.workspace import Workspace, open_workspace
from silo.worker import outbox, stages
from silo.worker import training as experts
from silo.worker.approval import approval_path, find_approval, load_draft, review_folder
from silo.worker.receipts import find_receipt
from silo.worker.room import check_folders, check_room
from silo.worker.state import IDLE, Problem, State, StateName, load_state, save_state, state_path

_log = logging.getLogger(__name__)
NOTE_S = 2.0  # time between two saves of the training progress


class Worker:
    """Runs the state machine of one site until its submission is answered.

    Args:
        site: the silo's folder.
        key: its signing key, opened.
        on_change: called with every state entered and every report of progress.
        isolation: what separates the courier from the data; stated in the submission.
        stopping: stops the worker once it is set.
    """

    def __init__(
        self,
        site: Site,
        key: SigningKey,
        on_change: Callable[[State], None],
        isolation: Isolation = "none",
        stopping: threading.Event | None = None,
    ) -> None:
        self.site = site
        self.isolation = isolation
        self.key = key
        self.settings = site.settings()
        self.policy = site.policy()
        self.on_change = on_change
        self.stopping = stopping or threading.Event()
        self.state = load_state(state_path(site.private))
        self._refused_now: set[tuple[str, tuple[int, int] | None]] = set()
        self._asked: dict[tuple[str, tuple[int, int] | None], str] = {}
        self._noted_at = 0.0

    def run(self) -> State:
        """Work until a submission is accepted; if the last one was accepted already, wait for the next plan.

        Returns:
            The state `accepted`.

        Raises:
            SubmissionRefusedError: the aggregator refused the submission.
            ArchipelagoError: a stage failed; the state keeps the problem, and a restart continues there.
            KeyboardInterrupt: the worker was asked to stop; everything done so far is on disk.
        """
        torch.set_num_threads(self.settings.threads)
        with locked(self.site.private, "worker"):
            check_folders(self.site)
            self.begin()
            while True:
                before = self.state
                try:
                    self.step()
                except ArchipelagoError as error:
                    self._keep_problem(error)
                    raise
                if self.state.state == "accepted" and before.state != "accepted":
                    return self.state
                if self.stopping.is_set():
                    raise KeyboardInterrupt
                if self.state == before:
                    self.stopping.wait(self.settings.poll_s)

    def begin(self) -> None:
        """Resume where an earlier process stopped; a restart retries what was refused."""
        if self.state.state == "plan_refused":
            self._enter(State())
        elif self.state.state == "refused":
            self._enter(self.state.to("released", sequence=self.state.sequence + 1, submission_digest=None))
        else:
            if self.state.state not in IDLE:
                self._work()
            self._announce()

    def step(self) -> None:
        """Perform the present state's step; a state that waits for something stays unchanged."""
        if self._take_notice():
            return
        steps: dict[StateName, Callable[[], None]] = {
            "waiting": self._accept_plan,
            "plan_refused": self._accept_plan,
            "accepted": self._accept_plan,
            "withdrawn": self._accept_plan,
            "plan_accepted": self._scan,
            "scanned": self._assign,
            "assigned": self._begin_training,
            "training": self._train_and_audit,
            "audited": self._draw_statistics,
            "released": self._draft,
            "awaiting_approval": self._await_approval,
            "in_outbox": self._await_receipt,
        }
        step = steps.get(self.state.state)
        if step:
            step()

    def _accept_plan(self) -> None:
        for plan_id in waiting_plans(self.site):
            if (mark := (plan_id, bundle_mark(self.site, plan_id))) in self._refused_now:
                continue
            if mark in self._asked and not is_accepted(self.site, self._asked[mark]):
                continue
            try:
                accepted = receive_plan(
                    self.site,
                    plan_id,
                    self.policy,
                    silo_id=self.settings.silo_id,
                    key=self.key.public,
                    max_bytes=self.settings.max_bundle_bytes,
                    now=now_utc(),
                    parts=self._parts,
                )
            except BusyError:
                continue  # the courier holds it for a moment
            except ArchipelagoError as error:
                self._refused_now.add(mark)
                refused = State(state="plan_refused", plan_id=plan_id, problem=_problem(error))
                self._enter(refused)
                return
            if not may_begin(self.site, self.policy, accepted.plan, accepted.digest):
                self._asked[mark] = accepted.digest
                _log.warning("plan %s waits for a person: silo accept SITE --digest %s", plan_id, accepted.digest)
                continue
            num_steps = accepted.plan.expert.training.num_steps
            fresh = State(plan_id=plan_id, plan_digest=accepted.digest, num_steps=num_steps)
            self._enter(fresh.to("plan_accepted"))
            self._work()
            return

    def _scan(self) -> None:
        accepted = self._plan()
        stages.check_auditable(accepted, self.policy)
        check_encoder(accepted.plan, self.settings)
        cohort = stages.scan(self.site, accepted, self.policy, self._encoded)
        stages.check_agreed(accepted, cohort, self.settings.silo_id)
        check_room(self.site, accepted.plan, cohort, self._work())
        stages.check_budget(accepted, cohort, stages.open_ledger(self.site, self.policy))
        self._enter(self.state.to("scanned", dataset_digest=cohort.digest))

    def _assign(self) -> None:
        accepted = self._plan()
        cohort, files = self._cohort(accepted), accepted.files()
        pixels = pixels_of(cohort, files.latent, accepted.plan)
        stages.assign(cohort, files, self._cohort_path, self._encoded, pixels=pixels)
        keep_latents(cohort, files.latent, accepted.plan, self.site.private, self._encoded)
        keep_texts(cohort, accepted.plan, self.settings, self.site.private, self._encoded)
        self._enter(self.state.to("assigned", step=0, num_steps=accepted.plan.expert.training.num_steps))

    def _begin_training(self) -> None:
        accepted, silo_id = self._plan(), self.settings.silo_id
        plan = accepted.plan
        if experts.counts_define_experts(plan):
            self._draw(accepted, ("counts",))
        parts = experts.find_parts(plan, accepted.files(), self._work(), silo_id)
        self._enter(self.state.to("training", num_steps=len(parts) * plan.expert.training.num_steps))

    def _train_and_audit(self) -> None:
        accepted, work = self._plan(), self._work()
        cohort = self._cohort(accepted)
        check_room(self.site, accepted.plan, cohort, work)
        experts.train_experts(
            accepted.plan,
            accepted.files(),
            training_inputs(cohort, accepted.plan, self.site.private),
            stages.read_assignment(cohort, accepted.files(), self._cohort_path),
            work,
            self.policy,
            self.settings.silo_id,
            on_progress=self._progress,
            should_stop=self.stopping.is_set,
            bundle=accepted.folder,
            own=own_experts(self.site, accepted.plan, self.settings.silo_id),
            engine=self.settings.training,
        )
        stages.audit_experts(accepted, work)
        stages.verdict(accepted, work, self.policy)
        self._enter(self.state.to("audited", step=self.state.num_steps))

    def _draw_statistics(self) -> None:
        accepted = self._plan()
        self._draw(accepted, mechanisms(accepted.plan))
        self._enter(self.state.to("released"))

    def _draw(self, accepted: AcceptedPlan, kinds: Iterable[Kind]) -> None:
        cohort = self._cohort(accepted)
        fine_N = stages.read_assignment(cohort, accepted.files(), self._cohort_path)
        ledger = stages.open_ledger(self.site, self.policy)
        inputs = training_inputs(cohort, accepted.plan, self.site.private)
        stages.draw_statistics(accepted, inputs, accepted.files(), fine_N, self._work(), ledger, kinds)

    def _draft(self) -> None:
        accepted, work = self._plan(), self._work()
        submission = outbox.draft(
            accepted,
            work,
            accepted.files(),
            stages.open_ledger(self.site, self.policy),
            stages.verdict(accepted, work, self.policy),
            silo_id=self.settings.silo_id,
            sequence=self.state.sequence,
            isolation=self.isolation,
            carry_over=self.policy.approval.carry_over,
            now=now_utc(),
        )
        digest = outbox.stage_review(submission, work, review_folder(self.site))
        self._enter(self.state.to("awaiting_approval", submission_digest=digest))

    def _await_approval(self) -> None:
        draft = load_draft(self.site)
        if draft.audit.waiver and draft.audit.waiver.expires_at <= now_utc():
            self._enter(self.state.to("released", submission_digest=None))  # to be drafted under another one
            return
        by_policy = self.policy.approval.kind == "policy" and self.state.sequence == 1
        approval = find_approval(self.site, draft, by_policy=by_policy, now=now_utc())
        if approval is None:
            return
        outbox.send(draft, self._work(), self.site, self.key, approval, now=now_utc())
        self._enter(self.state.to("in_outbox"))
        approval_path(self.site).unlink(missing_ok=True)

    def _await_receipt(self) -> None:
        sequence = self.state.sequence
        receipt = self._receipt(sequence)
        if receipt is None:
            return
        if isinstance(receipt.verdict, Refused):
            reason = f"{receipt.verdict.reason} (code {receipt.verdict.code})"
            got = f"a refusal: {reason}"
            error = SubmissionRefusedError(f"submission {sequence}", expected="an acceptance", got=got)
            self._enter(self.state.to("refused", problem=_problem(error)))
            raise error
        self._enter(self.state.to("accepted"))

    def _take_notice(self) -> bool:
        """Enter `withdrawn` if the aggregator took this silo out of the plan; the next receipt then says so.

        Raises:
            SubmissionRefusedError: the withdrawal answers a submission; after an accepted one the site only takes note.
        """
        state = self.state
        if state.plan_id is None or state.state in ("waiting", "plan_refused", "withdrawn"):
            return False
        answered = state.state == "accepted"
        receipt = self._receipt(state.sequence + answered)
        if receipt is None or not isinstance(receipt.verdict, Withdrawn):
            return False
        error = SubmissionRefusedError(
            f"plan {state.plan_id}",
            expected="this silo to take part",
            got=f"a notice that the aggregator withdrew this silo: {receipt.verdict.reason}",
            remedy="Later releases leave this silo's experts out; earlier ones keep them. A new plan may name it.",
        )
        self._enter(state.to("withdrawn", problem=_problem(error)))
        if answered:
            return True
        raise error

    def _receipt(self, sequence: int) -> Receipt | None:
        """Return the aggregator's receipt with this number, None if there is no genuine one."""
        plan_id = self._plan_id
        path = self.site.inbox / plan_id / "receipts" / f"{sequence}.json"
        if not path.exists():
            return None
        silo_id = self.settings.silo_id
        binding = (plan_id, self.state.plan_digest or "", silo_id, sequence)
        submission = self.site.outbox / plan_id / str(sequence) / submission_path(silo_id)
        return find_receipt(path, self._plan().plan, binding, submission)

    @property
    def _parts(self) -> int:
        """Into how many parts this machine divides a batch, as far as its settings tell."""
        engine = self.settings.training
        return engine.accumulate * (engine.processes if isinstance(engine.processes, int) else 1)

    @property
    def _plan_id(self) -> str:
        if self.state.plan_id is None:
            raise ArchipelagoError("state.json", expected=f"a plan in state {self.state.state}", got="no plan")
        return self.state.plan_id

    @property
    def _cohort_path(self) -> Path:
        return self.site.private / "cohort.parquet"

    def _plan(self) -> AcceptedPlan:
        return load_accepted(self.site, self._plan_id, self.state.plan_digest or "")

    def _work(self) -> Workspace:
        return open_workspace(self.site, self._plan_id)

    def _cohort(self, accepted: AcceptedPlan) -> Cohort:
        """Read the images again and check that they are those scanned: experts and statistics use the same data."""
        cohort = stages.scan(self.site, accepted, self.policy, self._encoded)
        if cohort.digest != self.state.dataset_digest:
            remedy = (
                "Restore images, table and decisions of the time when the plan was accepted, or give the plan up: "
                "silo withdraw."
            )
            expected = f"those that were scanned for this plan, digest {(self.state.dataset_digest or 'none')[:16]}"
            raise DataError("images", expected=expected, got=f"digest {cohort.digest[:16]}", remedy=remedy)
        return cohort

    def _encoded(self, num_done: int, num_images: int) -> None:
        """Show the progress of decoding or encoding, which is not saved: what is interrupted starts over."""
        if self.stopping.is_set():
            raise KeyboardInterrupt
        # Shown on this machine only: in the outbox, steps of the percentage would reveal the number of images.
        self.on_change(self.state.model_copy(update={"step": num_done, "num_steps": num_images}))

    def _progress(self, step: int, num_steps: int) -> None:
        self.state = self.state.model_copy(update={"step": step, "num_steps": num_steps})
        if time.monotonic() - self._noted_at >= NOTE_S:
            self._noted_at = time.monotonic()
            self._enter(self.state)

    def _enter(self, state: State) -> None:
        self.state = save_state(state_path(self.site.private), state)
        self._announce()

    def _announce(self) -> None:
        """Report the state to the courier, through the outbox, and to `on_change`."""
        state = self.state
        if state.plan_id:
            percent = 100 * state.step // state.num_steps if state.num_steps else 0
            status = {"plan_id": state.plan_id, "state": state.state, "progress": percent, "sequence": state.sequence}
            write_for_group(self.site.outbox / "status.json", json.dumps(status).encode())
        self.on_change(state)

    def _keep_problem(self, error: ArchipelagoError) -> None:
        if self.state.problem is None:
            self.state = self.state.model_copy(update={"problem": _problem(error)})
            save_state(state_path(self.site.private), self.state)


def _problem(error: ArchipelagoError) -> Problem:
    # What was received may be in it, and not every name of a file is text.
    message = f"{error} - {error.remedy}".encode("utf-8", "backslashreplace").decode()
    return Problem(code=error.exit_code, message=message[:400])
