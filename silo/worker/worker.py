"""The worker: takes one plan from the inbox to the outbox, one durable state at a time, without a network."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from ddm.errors import ApprovalError, ArchipelagoError, AuditError, BusyError, SetupError
from ddm.io.locks import locked
from ddm.protocol.base import MAX_TEXT, now_utc
from ddm.protocol.statistics import StatisticKind
from ddm.statistics.of_plan import statistics_of
from ddm.system.console import exit_code_of
from ddm.system.cores import default_threads
from ddm.system.escape import escape_control
from ddm.system.progress import ProgressCallback
from ddm.training.progress import Progress
from ddm.transport.messages import MAX_SUBMISSIONS
from ddm.trust.keys import SigningKey
from silo.config import Isolation, Policy, Site
from silo.data.captions import check_encoder, keep_texts
from silo.data.cohort import Cohort
from silo.data.latents import keep_latents, pixels_of, training_inputs
from silo.decisions import DecisionLog, PlanAccepted
from silo.plan.acceptance import (
    AcceptedPlan,
    bundle_mark,
    load_accepted,
    receive_plan,
    waiting_plans,
)
from silo.plan.consent import is_accepted, may_begin
from silo.plan.succession import InspectedBundles, find_successor
from silo.plan.workspace import Workspace, open_workspace
from silo.privacy.ledger import Ledger
from silo.worker import auditing, outbox, stages, training
from silo.worker.approval import (
    approval_path,
    approval_record,
    find_approval,
    load_draft,
    review_folder,
)
from silo.worker.disk_space import check_disk_space, check_folders
from silo.worker.life import AT_WORK, IDLE, Event
from silo.worker.pause import StopSignal
from silo.worker.progress import NOTE_S, ProgressMeter, Stage
from silo.worker.receipts import ReceiptReader
from silo.worker.retraining import changed_images
from silo.worker.state import (
    Problem,
    State,
    StateName,
    load_state,
    save_state,
    state_path,
    write_courier_status,
)
from silo.worker.withdrawal import empty_outbox, empty_outbox_of_superseded_plan

_log = logging.getLogger(__name__)
# Between two looks for a newer plan while training continues.
_LOOK_S = 2.0

BundleVersion = tuple[str, tuple[int, int] | None]
"""A plan's name, and what changes when the courier puts another bundle of it in the inbox."""


class _SupersededError(Exception):
    """Another plan was signed in place of the one in progress: nothing more is spent on this one."""

    def __init__(self, plan_id: str) -> None:
        super().__init__(plan_id)
        self.plan_id = plan_id


class Worker:
    """Runs the state machine of one site until its submission is answered.

    Args:
        site: the silo's folder.
        key: its signing key, opened.
        on_change: called with every state entered and every report of progress.
        isolation: what separates the courier from the data; stated in the submission.
        stopping: stops the worker once it is set.
        on_wait: called again and again while the work waits for a file, from the courier or from a person. Without it
            the worker does not wait for a waiver: an inconclusive audit ends the work, unless policy.toml got one in
            the meantime.

    Attributes:
        code: as the aggregator hears it, see `ddm.transport.messages.Status`.
    """

    def __init__(
        self,
        site: Site,
        key: SigningKey,
        on_change: Callable[[State], None],
        isolation: Isolation = "none",
        stopping: threading.Event | None = None,
        on_wait: Callable[[State], None] | None = None,
    ) -> None:
        self.site = site
        self.isolation = isolation
        self.key = key
        self.settings = site.settings()
        self.policy = site.policy()
        self.on_change = on_change
        self.stopping = stopping or threading.Event()
        self.on_wait = on_wait
        self.state = load_state(state_path(site.private))
        self.code = 0
        # Set while the work waits until policy.toml has another waiver.
        self._awaits_waiver = False
        self._refused_bundles: set[BundleVersion] = set()
        # Plans that wait for a person: the digest of each, which `silo accept` names.
        self._unaccepted_plans: dict[BundleVersion, str] = {}
        self._saved_at = 0.0
        self.look_s = _LOOK_S
        self._last_inspection_s = 0.0
        self._inspected_bundles: InspectedBundles = {}
        self._decisions = DecisionLog(site)
        self._meter = ProgressMeter(site.private)
        self._stop_signal = StopSignal(site, self.stopping)
        self._receipts = ReceiptReader(site, self.policy)

    def run(self) -> State:
        """Work until a submission is accepted; if the last one was accepted already, wait for the next plan.

        Returns:
            The state `accepted`.

        Raises:
            SubmissionRefusedError: the aggregator refused the submission.
            ArchipelagoError: a stage failed; the state keeps the problem, and a restart continues there.
            KeyboardInterrupt: the worker was asked to stop; everything done so far is on disk.
        """
        torch.set_num_threads(self.settings.training.threads or default_threads())
        # Inside the lock: only the worker that has it may say what becomes of the work.
        with locked(self.site.private, "worker"):
            try:
                return self._run_to_acceptance()
            except BaseException as error:
                self._report_end(error)
                raise

    def _run_to_acceptance(self) -> State:
        check_folders(self.site)
        self.begin()
        while True:
            state_before = self.state
            self._step_once()
            if self.state.state == "accepted" and state_before.state != "accepted":
                return self.state
            if self.stopping.is_set():
                raise KeyboardInterrupt
            # Nothing happened: the worker waits for a file, from the courier or from a person.
            if self.state == state_before:
                if self.on_wait is not None:
                    self.on_wait(self.state)
                self.stopping.wait(self.settings.poll_s)

    def _report_end(self, error: BaseException) -> None:
        """Tell the aggregator that the work ended here: the exit code, and nothing else of the error."""
        # A full disk, on which the number cannot be written either, must not hide the error.
        with suppress(OSError):
            self._report_code(exit_code_of(error))

    def _step_once(self) -> None:
        """Wait while the site is paused, then perform one step; a pause that begins meanwhile interrupts it."""
        try:
            self._stop_signal.wait_while_paused(self.settings.poll_s)
            self.step()
        except AuditError as error:
            self.keep_problem(error)
            if self.on_wait is None and not self._has_other_policy():
                raise
            self._awaits_waiver = True
            self._report_code(error.exit_code)
        except ArchipelagoError as error:
            self.keep_problem(error)
            raise
        except KeyboardInterrupt:
            if not self._stop_signal.is_pause():
                raise

    def begin(self) -> None:
        """Resume where an earlier process stopped; a restart retries what was refused, and what went wrong.

        Raises:
            DecisionLogError: the log of decisions is damaged.
        """
        self._decisions.notice_policy(self.policy)
        state = self.state
        if state.state == "plan_refused":
            # A person may have changed policy.toml meanwhile: the plan is looked at as if it had just arrived.
            self._enter(State())
        elif state.state == "refused" and state.sequence < MAX_SUBMISSIONS:
            self._advance("restart", sequence=state.sequence + 1, submission_digest=None)
        else:
            if state.state in AT_WORK:
                self.workspace()
                # Not saved: the problem stays on disk until a step succeeds.
                self.state = state.model_copy(update={"problem": None})
            empty_outbox_of_superseded_plan(self.site, state)
            self._announce()

    def step(self) -> None:
        """Perform the present state's step; a state that waits for something stays unchanged."""
        # A receipt comes first: whatever this state would do next, the aggregator may have ended it.
        if self._apply_receipt():
            return
        steps: dict[StateName, Callable[[], None]] = {
            **dict.fromkeys(IDLE, self._accept_plan),
            "plan_accepted": self._scan_images,
            "scanned": self._assign_images,
            "assigned": self._begin_training,
            "training": self._train_experts,
            "auditing": self._audit_experts,
            "audited": self._draw_statistics,
            "released": self._write_draft,
            "awaiting_approval": self._send_when_approved,
        }
        perform_step = steps.get(self.state.state)
        try:
            self._check_in_force()
            if perform_step is not None and not self._waits_for_waiver():
                perform_step()
        except _SupersededError as error:
            # The receipt may have come together with the next plan's metadata, after the first look.
            if not self._apply_receipt():
                self._end_plan("succession", successor=error.plan_id)

    def _waits_for_waiver(self) -> bool:
        """Whether the work waits for a waiver; a policy.toml that has changed takes effect, as at a new start."""
        if not self._awaits_waiver:
            return False
        try:
            policy = self.site.policy()
        except SetupError:
            # Somebody is still writing it.
            return True
        if policy == self.policy:
            return True
        self._adopt_policy(policy)
        self._awaits_waiver = False
        self.state = self.state.model_copy(update={"problem": None})
        self._report_code(0)
        return False

    def _has_other_policy(self) -> bool:
        """Whether policy.toml was changed since it was read, perhaps by a waiver."""
        try:
            return self.site.policy() != self.policy
        except SetupError:
            return False

    def _adopt_policy(self, policy: Policy) -> None:
        # The log first: nothing takes effect that no record names.
        self._decisions.notice_policy(policy)
        self.policy = policy
        self._receipts = ReceiptReader(self.site, policy)

    def _check_in_force(self) -> None:
        """Stop before anything is spent on a plan that was superseded.

        Raises:
            _SupersededError: the federation's keys have signed another plan.
        """
        if self.state.state not in AT_WORK:
            return
        newer_plan_id = find_successor(self.site, self._plan_id, self._inspected_bundles)
        if newer_plan_id is not None:
            raise _SupersededError(newer_plan_id)

    def should_stop(self) -> bool:
        """Whether training should stop, since somebody asked for it or the plan was superseded meanwhile."""
        if self._stop_signal.is_set():
            return True
        # Training calls this before every step; the inbox is looked at less often.
        now = time.monotonic()
        if now - self._last_inspection_s < self.look_s:
            return False
        self._last_inspection_s = now
        return find_successor(self.site, self._plan_id, self._inspected_bundles) is not None

    def _accept_plan(self) -> None:
        """Accept the first plan in the inbox that this site may work on, or state why one was refused."""
        for plan_id in waiting_plans(self.site):
            bundle = (plan_id, bundle_mark(self.site, plan_id))
            if bundle in self._refused_bundles or self._waits_for_person(bundle):
                continue
            try:
                accepted = self._receive_plan(plan_id)
            except BusyError:
                continue  # the courier holds it for a moment
            except ArchipelagoError as error:
                # Not tried again until the courier puts another bundle in its place, or the worker is started again.
                self._refused_bundles.add(bundle)
                declined = State(plan_id=plan_id).after("decline", problem=_problem_of(error))
                self._enter(declined)
                return
            if may_begin(self.site, self.policy, accepted.plan, accepted.digest):
                self._begin_plan(accepted)
                return
            self._unaccepted_plans[bundle] = accepted.digest
            self._report_code(ApprovalError.exit_code)
            _log.warning(
                "plan %s waits for a person: silo accept %s --digest %s",
                plan_id,
                self.site.path,
                accepted.digest,
            )

    def _waits_for_person(self, bundle: BundleVersion) -> bool:
        """Whether this very bundle was verified before, and still waits for `silo accept`."""
        plan_digest = self._unaccepted_plans.get(bundle)
        return plan_digest is not None and not is_accepted(self.site, plan_digest)

    def _receive_plan(self, plan_id: str) -> AcceptedPlan:
        return receive_plan(
            self.site,
            plan_id,
            self.policy,
            silo_id=self.settings.silo_id,
            key=self.key.public,
            max_bytes=self.settings.max_bundle_bytes,
            now=now_utc(),
            parts=self.settings.batch_parts,
        )

    def _begin_plan(self, accepted: AcceptedPlan) -> None:
        plan_id = accepted.plan.plan_id
        # The decision is on disk before the state: a site never works on a plan that its log does not name.
        self._decisions.add(PlanAccepted(plan_id=plan_id, plan_digest=accepted.digest))
        state = State(
            plan_id=plan_id,
            plan_digest=accepted.digest,
            num_steps=accepted.plan.expert.training.num_steps,
        )
        self._enter(state.after("accept"))
        self.workspace()

    def _scan_images(self) -> None:
        """Read the images, and refuse now what would fail only after days of training."""
        accepted = self.accepted_plan()
        # From the cheapest check to the most expensive one; to read the images may take hours.
        check_encoder(accepted.plan, self.settings)
        cohort = stages.scan_images(
            self.site, accepted, self.policy, self.count_images("reading images")
        )
        auditing.check_auditable(accepted, self.policy, cohort)
        stages.check_agreed_numbers(accepted, cohort, self.settings.silo_id)
        check_disk_space(self.site, accepted.plan, cohort, self.workspace())
        stages.check_budget(accepted, cohort, self._open_ledger())
        # What was made of other images, before `silo retrain`, must not be taken for that of these.
        self.workspace().clear()
        self._advance("scan", dataset_digest=cohort.digest)

    def _assign_images(self) -> None:
        accepted = self.accepted_plan()
        plan = accepted.plan
        files = accepted.files()
        private = self.site.private
        cohort = self.read_cohort(accepted)
        stages.assign_images(
            cohort,
            files,
            self.cohort_path,
            self.count_images("assigning images"),
            pixels=pixels_of(cohort, files.latent, plan),
        )
        keep_latents(cohort, files.latent, plan, private, self.count_images("encoding images"))
        keep_texts(cohort, plan, self.settings, private, self.count_images("encoding captions"))
        self._advance("assign", step=0, num_steps=plan.expert.training.num_steps)

    def _begin_training(self) -> None:
        accepted = self.accepted_plan()
        plan = accepted.plan
        # Where the noised histogram decides which experts there are, it is drawn before training, and the draw of all
        # statistics finds it done.
        if training.counts_define_experts(plan):
            self._draw(accepted, ("counts",))
        parts = training.find_parts(plan, accepted.files(), self.workspace(), self.settings.silo_id)
        self._advance("begin", num_steps=len(parts) * plan.expert.training.num_steps)

    def _train_experts(self) -> None:
        accepted = self.accepted_plan()
        batch_size = accepted.plan.expert.training.batch_size
        cohort = self.read_cohort(accepted)
        inputs = self._gather_audit_inputs(accepted, cohort)
        with self._stopped_by_newer_plan():
            paid = stages.debit_training(self.site, self.policy, accepted, cohort)
            training.train_experts(
                replace(inputs.training, paid=paid),
                on_progress=lambda progress: self._show_training(progress, batch_size),
                should_stop=self.should_stop,
            )
        self._advance("train", step=self.state.num_steps)

    def _audit_experts(self) -> None:
        accepted = self.accepted_plan()
        inputs = self._gather_audit_inputs(accepted, self.read_cohort(accepted))
        with self._stopped_by_newer_plan():
            auditing.audit_experts(inputs, self.count_images("auditing"), self.should_stop)
        # Refuses an inconclusive audit without a waiver here, before the statistics cost any epsilon.
        auditing.audit_verdict(accepted, self.workspace(), self.policy)
        self._advance("audit")

    def _gather_audit_inputs(self, accepted: AcceptedPlan, cohort: Cohort) -> auditing.AuditInputs:
        work = self.workspace()
        check_disk_space(self.site, accepted.plan, cohort, work)
        return auditing.gather_audit_inputs(
            self.site, accepted, work, self.policy, cohort, self.cohort_path
        )

    @contextmanager
    def _stopped_by_newer_plan(self) -> Iterator[None]:
        """Tell a newer plan from Ctrl-C and a pause: training stops in the same way for each of them."""
        try:
            yield
        except KeyboardInterrupt:
            self._check_in_force()
            raise

    def _draw_statistics(self) -> None:
        accepted = self.accepted_plan()
        self._draw(accepted, statistics_of(accepted.plan.statistics))
        self._advance("draw")

    def _draw(self, accepted: AcceptedPlan, kinds: Iterable[StatisticKind]) -> None:
        cohort = self.read_cohort(accepted)
        files = accepted.files()
        fine_N = stages.read_assignment(cohort, files, self.cohort_path)
        ledger = self._open_ledger()
        inputs = training_inputs(cohort, accepted.plan, self.site.private)
        # To read the images may have taken hours, in which another plan may have been signed.
        self._check_in_force()
        stages.draw_statistics(accepted, inputs, files, fine_N, self.workspace(), ledger, kinds)

    def _write_draft(self) -> None:
        accepted = self.accepted_plan()
        work = self.workspace()
        if self.state.sequence > 1:
            # A submission that was refused is not sent again when the images have changed meanwhile.
            self.read_cohort(accepted)
        submission = outbox.write_draft(
            accepted,
            work,
            self._open_ledger(),
            auditing.audit_verdict(accepted, work, self.policy),
            outbox.DraftTerms(
                silo_id=self.settings.silo_id,
                dataset_digest=self.state.dataset_digest or "",
                sequence=self.state.sequence,
                isolation=self.isolation,
                carry_over=self.policy.approval.carry_over,
                serve_as_base=self.policy.approval.serve_as_base,
                created_at=now_utc(),
            ),
        )
        digest = outbox.stage_review(submission, work, review_folder(self.site))
        self._advance("draft", submission_digest=digest)

    def _send_when_approved(self) -> None:
        draft = load_draft(self.site)
        # Anybody who signed the waiver answered for a limited time: a later draft needs another one.
        if draft.audit.waiver and draft.audit.waiver.expires_at <= now_utc():
            self._advance("lapse", submission_digest=None)
            return
        # A policy approves a first submission alone: a person looks at what the aggregator refused once.
        by_policy = self.policy.approval.kind == "policy" and self.state.sequence == 1
        approval = find_approval(self.site, draft, by_policy=by_policy, now=now_utc())
        if approval is None:
            return
        if approval.kind == "policy":
            self._decisions.add(approval_record(draft, "policy"))
        outbox.send_submission(
            draft, self.workspace(), self.site, self.key, approval, now=now_utc()
        )
        self._advance("send")
        # The approval goes last: a worker that dies before this finds the submission in the outbox and continues.
        approval_path(self.site).unlink(missing_ok=True)

    def _apply_receipt(self) -> bool:
        """Enter the state to which a new receipt leads; False where there is none.

        Raises:
            SubmissionRefusedError: it refused the submission.
        """
        notice = self._receipts.read(self.state)
        if notice is None:
            return False
        problem = None
        if notice.problem is not None:
            problem = _problem_of(notice.problem)
        # The state is on disk before the error is raised, so that a restart does not hear the same receipt again.
        if notice.event == "notice":
            self._end_plan("notice", **notice.changes, problem=problem)
        else:
            self._advance(notice.event, **notice.changes, problem=problem)
        # A silo that was left out has nothing to correct, and waits for the next plan.
        if notice.problem is not None and notice.event == "refusal":
            raise notice.problem
        return True

    @property
    def _plan_id(self) -> str:
        if self.state.plan_id is None:
            raise ArchipelagoError(
                "state.json", expected=f"a plan in state {self.state.state}", got="no plan"
            )
        return self.state.plan_id

    @property
    def cohort_path(self) -> Path:
        """The table of the images and their clusters."""
        return self.site.private / "cohort.parquet"

    def accepted_plan(self) -> AcceptedPlan:
        """Load the plan in progress, by the digest that was pinned when it was accepted."""
        return load_accepted(self.site, self._plan_id, self.state.plan_digest or "")

    def workspace(self) -> Workspace:
        """Open the folder of the plan in progress."""
        return open_workspace(self.site, self._plan_id)

    def _open_ledger(self) -> Ledger:
        return stages.open_ledger(self.site, self.policy)

    def read_cohort(self, accepted: AcceptedPlan) -> Cohort:
        """Read the images again and check that they are those scanned: experts and statistics use the same data.

        Raises:
            DataError: they are others.
        """
        cohort = stages.scan_images(
            self.site, accepted, self.policy, self.count_images("reading images")
        )
        if cohort.digest != self.state.dataset_digest:
            raise changed_images(self.state, accepted, cohort, self._open_ledger())
        return cohort

    def count_images(self, stage: Stage) -> ProgressCallback:
        """Return what shows the progress of a stage; it is not saved, since an interrupted stage starts over."""

        def count(num_done: int, num_images: int) -> None:
            if self._stop_signal.is_set():
                raise KeyboardInterrupt
            # Shown on this machine only: in the outbox, steps of the percentage would reveal the number of images.
            self._meter.count(stage, self._plan_id, num_done, num_images)
            shown = self.state.model_copy(update={"step": num_done, "num_steps": num_images})
            self.on_change(shown)

        return count

    def _show_training(self, progress: Progress, batch_size: int) -> None:
        """Note loss and speed for this machine, and save the number of steps, which the aggregator may know."""
        self._meter.train(self._plan_id, progress, batch_size)
        self.state = self.state.model_copy(
            update={"step": progress.step, "num_steps": progress.num_steps}
        )
        if time.monotonic() - self._saved_at >= NOTE_S:
            self._saved_at = time.monotonic()
            self._enter(self.state)

    def _advance(self, event: Event, **changes: object) -> None:
        self._enter(self.state.after(event, **changes))

    def _end_plan(self, event: Event, **changes: object) -> None:
        """Enter a state in which nobody may fetch the submission any more: it cannot be taken back from there."""
        # What was answered has left; the outbox is the record of it.
        if self.state.state in AT_WORK - {"refused"}:
            # Before the state: a worker that dies in between finds the same event again, and empties the rest.
            empty_outbox(self.site, self.state)
        self._advance(event, **changes)

    def _enter(self, state: State) -> None:
        self.state = save_state(state_path(self.site.private), state)
        self._awaits_waiver = False
        self.code = 0
        self._announce()

    def _announce(self) -> None:
        """Report the state to the courier, through the outbox, and to `on_change`."""
        write_courier_status(self.site, self.state, self.code)
        self.on_change(self.state)

    def _report_code(self, code: int) -> None:
        """Report whether a person here must act before the work continues."""
        self.code = code
        write_courier_status(self.site, self.state, code)

    def keep_problem(self, error: ArchipelagoError) -> None:
        """Save why the work stopped, unless the state came with its own reason."""
        if self.state.problem is None:
            self.state = self.state.model_copy(update={"problem": _problem_of(error)})
            save_state(state_path(self.site.private), self.state)


def _problem_of(error: ArchipelagoError) -> Problem:
    return Problem(
        code=error.exit_code,
        message=_short_text(str(error)),
        remedy=_short_text(error.remedy),
    )


def _short_text(text: str) -> str:
    # A message may hold what was received, or the name of a file, and not all of these are text.
    return escape_control(text, one_line=True)[:MAX_TEXT]
