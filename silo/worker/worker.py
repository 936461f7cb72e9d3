"""The worker: takes one plan from the inbox to the outbox, one durable state at a time, without a network."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ddm.errors import ArchipelagoError, BusyError
from ddm.io.locks import locked
from ddm.protocol.base import now_utc
from ddm.protocol.statistics import StatisticKind
from ddm.statistics.of_plan import statistics_of
from ddm.training.loop import Progress
from ddm.transport.messages import MAX_SUBMISSIONS
from ddm.trust.keys import SigningKey
from silo.config import Isolation, Site
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
from silo.plan.succession import Looked, successor
from silo.plan.workspace import Workspace, open_workspace
from silo.worker import auditing, outbox, stages
from silo.worker import training as experts
from silo.worker.approval import (
    approval_path,
    approval_record,
    find_approval,
    load_draft,
    review_folder,
)
from silo.worker.disk_space import check_disk_space, check_folders
from silo.worker.life import AT_WORK, IDLE, Event
from silo.worker.listening import Listener
from silo.worker.pause import StopSignal
from silo.worker.progress import NOTE_S, ProgressMeter, Stage
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

_log = logging.getLogger(__name__)
_LOOK_S = 2.0  # time between two looks for a newer plan while the work goes on


class _SupersededError(Exception):
    """Another plan was signed in the place of the one in work: nothing more is spent on this one."""

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
        self._noted_at = self._looked_at = 0.0
        self._looked: Looked = {}
        self._decisions = DecisionLog(site)
        self._meter = ProgressMeter(site.private)
        self._halt = StopSignal(site, self.stopping)
        self._listener = Listener(site, self.policy)
        self._asked: dict[tuple[str, tuple[int, int] | None], str] = {}

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
                    self._halt.wait(self.settings.poll_s)
                    self.step()
                except ArchipelagoError as error:
                    self._keep_problem(error)
                    raise
                except KeyboardInterrupt:
                    if not self._halt.was_pause():
                        raise
                if self.state.state == "accepted" and before.state != "accepted":
                    return self.state
                if self.stopping.is_set():
                    raise KeyboardInterrupt
                if self.state == before:
                    self.stopping.wait(self.settings.poll_s)

    def begin(self) -> None:
        """Resume where an earlier process stopped; a restart retries what was refused, and what went wrong.

        Raises:
            DecisionLogError: the log of decisions is damaged.
        """
        self._decisions.notice_policy(self.policy)
        state = self.state
        if state.state == "plan_refused":
            self._enter(State())
        elif state.state == "refused" and state.sequence < MAX_SUBMISSIONS:
            self._go("restart", sequence=state.sequence + 1, submission_digest=None)
        else:
            if state.state in AT_WORK:
                self._work()
                self.state = state.model_copy(update={"problem": None})
            self._announce()

    def step(self) -> None:
        """Perform the present state's step; a state that waits for something stays unchanged."""
        if self._listen():
            return
        steps: dict[StateName, Callable[[], None]] = {
            **dict.fromkeys(IDLE, self._accept_plan),
            "plan_accepted": self._scan,
            "scanned": self._assign,
            "assigned": self._begin_training,
            "training": self._train_and_audit,
            "audited": self._draw_statistics,
            "released": self._draft,
            "awaiting_approval": self._await_approval,
        }
        try:
            self._check_in_force()
            if step := steps.get(self.state.state):
                step()
        except _SupersededError as found:
            self._go("succession", successor=found.plan_id)

    def _check_in_force(self) -> None:
        """Stop before anything is spent on a plan that was superseded.

        Raises:
            _SupersededError: the federation's keys have signed another plan.
        """
        if self.state.state in AT_WORK and (
            found := successor(self.site, self._plan_id, self._looked)
        ):
            raise _SupersededError(found)

    def _should_stop(self) -> bool:
        """Whether training should stop, since somebody asked for it or the plan was superseded meanwhile."""
        if self._halt.asked() or time.monotonic() - self._looked_at < _LOOK_S:
            return self._halt.asked()
        self._looked_at = time.monotonic()
        return successor(self.site, self._plan_id, self._looked) is not None

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
                self._enter(State(plan_id=plan_id).after("decline", problem=_problem(error)))
                return
            if not may_begin(self.site, self.policy, accepted.plan, accepted.digest):
                self._asked[mark] = accepted.digest
                _log.warning(
                    "plan %s waits for a person: silo accept SITE --digest %s",
                    plan_id,
                    accepted.digest,
                )
                continue
            self._decisions.add(PlanAccepted(plan_id=plan_id, plan_digest=accepted.digest))
            num_steps = accepted.plan.expert.training.num_steps
            self._enter(
                State(plan_id=plan_id, plan_digest=accepted.digest, num_steps=num_steps).after(
                    "accept"
                )
            )
            self._work()
            return

    def _scan(self) -> None:
        accepted = self._plan()
        check_encoder(accepted.plan, self.settings)
        cohort = stages.scan_images(
            self.site, accepted, self.policy, self._counting("reading images")
        )
        auditing.check_auditable(accepted, self.policy, cohort)
        stages.check_agreed_numbers(accepted, cohort, self.settings.silo_id)
        check_disk_space(self.site, accepted.plan, cohort, self._work())
        stages.check_budget(accepted, cohort, stages.open_ledger(self.site, self.policy))
        self._work().clear()  # of what was made of other images, before `silo retrain`
        self._go("scan", dataset_digest=cohort.digest)

    def _assign(self) -> None:
        accepted = self._plan()
        cohort, files = self._cohort(accepted), accepted.files()
        pixels = pixels_of(cohort, files.latent, accepted.plan)
        stages.assign_images(
            cohort, files, self._cohort_path, self._counting("assigning images"), pixels=pixels
        )
        keep_latents(
            cohort,
            files.latent,
            accepted.plan,
            self.site.private,
            self._counting("encoding images"),
        )
        keep_texts(
            cohort,
            accepted.plan,
            self.settings,
            self.site.private,
            self._counting("encoding captions"),
        )
        self._go("assign", step=0, num_steps=accepted.plan.expert.training.num_steps)

    def _begin_training(self) -> None:
        accepted = self._plan()
        if experts.counts_define_experts(accepted.plan):
            self._draw(accepted, ("counts",))
        parts = experts.find_parts(
            accepted.plan, accepted.files(), self._work(), self.settings.silo_id
        )
        self._go("begin", num_steps=len(parts) * accepted.plan.expert.training.num_steps)

    def _train_and_audit(self) -> None:
        accepted, work = self._plan(), self._work()
        cohort = self._cohort(accepted)
        check_disk_space(self.site, accepted.plan, cohort, work)
        audited = auditing.gather_audit_inputs(
            self.site, accepted, work, self.policy, cohort, self._cohort_path
        )
        try:
            experts.train_experts(
                accepted.plan,
                accepted.files(),
                audited.inputs,
                audited.fine_N,
                work,
                self.policy,
                self.settings.silo_id,
                on_progress=lambda told: self._progress(
                    told, accepted.plan.expert.training.batch_size
                ),
                should_stop=self._should_stop,
                bundle=accepted.folder,
                own=audited.own,
                engine=self.settings.training,
                held_N=audited.held_N,
                paid=stages.debit_training(self.site, self.policy, accepted, cohort),
            )
            auditing.audit_experts(audited, self._counting("auditing"), self._should_stop)
        except KeyboardInterrupt:
            self._check_in_force()
            raise
        auditing.audit_verdict(accepted, work, self.policy)
        self._go("train", step=self.state.num_steps)

    def _draw_statistics(self) -> None:
        accepted = self._plan()
        self._draw(accepted, statistics_of(accepted.plan.statistics))
        self._go("draw")

    def _draw(self, accepted: AcceptedPlan, kinds: Iterable[StatisticKind]) -> None:
        cohort = self._cohort(accepted)
        fine_N = stages.read_assignment(cohort, accepted.files(), self._cohort_path)
        ledger = stages.open_ledger(self.site, self.policy)
        inputs = training_inputs(cohort, accepted.plan, self.site.private)
        self._check_in_force()  # to read the images may have taken hours
        stages.draw_statistics(
            accepted, inputs, accepted.files(), fine_N, self._work(), ledger, kinds
        )

    def _draft(self) -> None:
        accepted, work = self._plan(), self._work()
        # what was refused is not sent again when the images were mended meanwhile
        if self.state.sequence > 1:
            self._cohort(accepted)
        submission = outbox.write_draft(
            accepted,
            work,
            accepted.files(),
            stages.open_ledger(self.site, self.policy),
            auditing.audit_verdict(accepted, work, self.policy),
            silo_id=self.settings.silo_id,
            dataset_digest=self.state.dataset_digest or "",
            sequence=self.state.sequence,
            isolation=self.isolation,
            carry_over=self.policy.approval.carry_over,
            now=now_utc(),
        )
        digest = outbox.stage_review(submission, work, review_folder(self.site))
        self._go("draft", submission_digest=digest)

    def _await_approval(self) -> None:
        draft = load_draft(self.site)
        if draft.audit.waiver and draft.audit.waiver.expires_at <= now_utc():
            self._go("lapse", submission_digest=None)
            return
        by_policy = self.policy.approval.kind == "policy" and self.state.sequence == 1
        approval = find_approval(self.site, draft, by_policy=by_policy, now=now_utc())
        if approval is None:
            return
        if approval.kind == "policy":
            self._decisions.add(approval_record(draft, "policy"))
        outbox.send_submission(draft, self._work(), self.site, self.key, approval, now=now_utc())
        self._go("send")
        approval_path(self.site).unlink(missing_ok=True)

    def _listen(self) -> bool:
        """Enter the state to which the aggregator's word leads; False where it has said nothing new.

        Raises:
            SubmissionRefusedError: it refused the submission, or left this silo out before it accepted one.
        """
        if (said := self._listener.word(self.state)) is None:
            return False
        self._go(
            said.event,
            **said.changes,
            problem=None if said.problem is None else _problem(said.problem),
        )
        if said.problem and said.ends:
            raise said.problem
        return True

    @property
    def _parts(self) -> int:
        """Into how many parts this machine divides a batch, as far as its settings tell."""
        engine = self.settings.training
        return engine.accumulate * (engine.processes if isinstance(engine.processes, int) else 1)

    @property
    def _plan_id(self) -> str:
        if self.state.plan_id is None:
            raise ArchipelagoError(
                "state.json", expected=f"a plan in state {self.state.state}", got="no plan"
            )
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
        cohort = stages.scan_images(
            self.site, accepted, self.policy, self._counting("reading images")
        )
        if cohort.digest != self.state.dataset_digest:
            raise changed_images(
                self.state, accepted, cohort, stages.open_ledger(self.site, self.policy)
            )
        return cohort

    def _counting(self, stage: Stage) -> Callable[[int, int], None]:
        """Show the progress of decoding or encoding, which is not saved: what is interrupted starts over."""

        def count(num_done: int, num_images: int) -> None:
            if self._halt.asked():
                raise KeyboardInterrupt
            # Shown on this machine only: in the outbox, steps of the percentage would reveal the number of images.
            self._meter.count(stage, self._plan_id, num_done, num_images)
            self.on_change(
                self.state.model_copy(update={"step": num_done, "num_steps": num_images})
            )

        return count

    def _progress(self, told: Progress, batch_size: int) -> None:
        # loss and speed are for this machine only
        self._meter.train(self._plan_id, told, batch_size)
        self.state = self.state.model_copy(update={"step": told.step, "num_steps": told.num_steps})
        if time.monotonic() - self._noted_at >= NOTE_S:
            self._noted_at = time.monotonic()
            self._enter(self.state)

    def _go(self, event: Event, **changes: object) -> None:
        self._enter(self.state.after(event, **changes))

    def _enter(self, state: State) -> None:
        self.state = save_state(state_path(self.site.private), state)
        self._announce()

    def _announce(self) -> None:
        """Report the state to the courier, through the outbox, and to `on_change`."""
        write_courier_status(self.site, self.state)
        self.on_change(self.state)

    def _keep_problem(self, error: ArchipelagoError) -> None:
        """Keep why the work stopped, unless the state came with its own reason."""
        if self.state.problem is None:
            self.state = self.state.model_copy(update={"problem": _problem(error)})
            save_state(state_path(self.site.private), self.state)


def _problem(error: ArchipelagoError) -> Problem:
    # What was received may be in it, and not every name of a file is text.
    said, remedy = (
        text.encode("utf-8", "backslashreplace").decode()[:400]
        for text in (str(error), error.remedy)
    )
    return Problem(code=error.exit_code, message=said, remedy=remedy)
