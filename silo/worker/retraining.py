"""Training again for a plan in progress: what it costs, and how the site goes back to where the plan was accepted.

A refused submission may be sent again as it is, which costs nothing. A correction of the images only counts once
everything was trained and drawn again: noise for other images is another debit of the ledger.
"""

from dataclasses import dataclass

from ddm.errors import ApprovalError, BudgetError, DataError
from ddm.io.locks import locked
from ddm.privacy.accounting import adaptive_epsilon
from ddm.statistics.cost import paid_mechanisms
from ddm.transport.messages import MAX_SUBMISSIONS
from silo.config import Site
from silo.data.cohort import Cohort
from silo.decisions import DecisionLog, RetrainingStarted
from silo.plan.acceptance import AcceptedPlan, load_accepted
from silo.plan.succession import find_successor
from silo.privacy.ledger import Debit, Ledger
from silo.worker import stages
from silo.worker.approval import approval_path
from silo.worker.life import next_state
from silo.worker.state import State, load_state, save_state, state_path, write_courier_status

# Of a sum of epsilons, which is rounded.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class RetrainingCost:
    """What training again costs.

    Attributes:
        epsilon: the epsilon that noise for other images would add to what was spent.
        left: that the site's budget still holds.
        num_steps: the number of steps of each expert.
    """

    epsilon: float
    left: float
    num_steps: int

    @property
    def affordable(self) -> bool:
        """Whether the budget covers it."""
        return self.epsilon <= self.left * _ROUNDING

    def __str__(self) -> str:
        text = f"{self.num_steps} steps an expert, epsilon {self.epsilon:.3g} more of {self.left:.3g} left"
        if not self.affordable:
            text += ", which the budget does not cover"
        return text


def retraining_cost(
    accepted: AcceptedPlan, ledger: Ledger, dataset_digest: str | None = None
) -> RetrainingCost:
    """Return what it costs to train and draw again, for other images than before unless a digest names them."""
    delta = ledger.budget.delta
    debits = [entry.record for entry in ledger.entries if isinstance(entry.record, Debit)]
    # Epsilons of several plans do not add up: the mechanisms of all of them are accounted for together.
    debited_steps = [tuple(debit.mechanisms.values()) for debit in debits]
    spent = adaptive_epsilon(debited_steps, delta)
    paid_before = any(
        debit.plan_digest == accepted.digest and debit.dataset_digest == dataset_digest
        for debit in debits
    )
    # Noise is drawn once for a plan and its images: the same images draw nothing again.
    additional = 0.0
    if not paid_before:
        next_step = tuple(paid_mechanisms(accepted.plan).values())
        additional = adaptive_epsilon([*debited_steps, next_step], delta) - spent
    return RetrainingCost(
        epsilon=additional,
        left=max(ledger.budget.epsilon - spent, 0.0),
        num_steps=accepted.plan.expert.training.num_steps,
    )


def refused_remedy(state: State, accepted: AcceptedPlan, ledger: Ledger) -> str:
    """Say what may be tried after a refusal, and what each way costs."""
    # The aggregator fetches no further submission of this plan.
    if state.sequence >= MAX_SUBMISSIONS:
        return (
            f"It was the last of {MAX_SUBMISSIONS} submissions to this plan. Keep `silo run SITE` "
            "running for the next plan."
        )
    number = f"submission {state.sequence + 1} of {MAX_SUBMISSIONS}"
    cost = retraining_cost(accepted, ledger)
    return (
        f"`silo run SITE` sends the same experts again, as {number}: no training, no epsilon, a "
        f"person approves. After a change of the images: `silo retrain SITE` ({cost}). Or give "
        "the plan up: `silo withdraw SITE`."
    )


def changed_images(
    state: State, accepted: AcceptedPlan, cohort: Cohort, ledger: Ledger
) -> DataError:
    """Return the error for images that are others than those scanned for this plan."""
    cost = retraining_cost(accepted, ledger, cohort.digest)
    return DataError(
        "images",
        expected=f"those that were scanned for this plan, digest {(state.dataset_digest or 'none')[:16]}",
        got=f"digest {cohort.digest[:16]}",
        remedy=(
            f"Train on the present ones: `silo retrain SITE` ({cost}). Or restore images, table "
            "and decisions to what they were at the scan, then `silo run SITE`. Or give the plan "
            "up: `silo withdraw SITE`."
        ),
    )


def assess_retraining(site: Site) -> tuple[State, RetrainingCost, bool]:
    """Read the images and say what training again would cost, and whether they changed; nothing is changed.

    Raises:
        BusyError: the worker is running.
        ApprovalError: no plan is in progress, its submission was sent, or it was superseded.
        DataError: the images cannot be used.
    """
    with locked(site.private, "worker"):
        return _assess(site)


def _assess(site: Site) -> tuple[State, RetrainingCost, bool]:
    state = load_state(state_path(site.private))
    policy = site.policy()
    # Refuses a state in which the event cannot happen, before hours are spent on reading images.
    next_state(state.state, "retrain")
    sent = (site.outbox / (state.plan_id or "") / str(state.sequence)).exists()
    if sent and state.state != "refused":  # the worker stopped between sending and recording it
        raise ApprovalError(
            "retraining",
            expected="a submission not sent",
            got="one in the outbox",
            remedy="Wait for the receipt with `silo run SITE`. Or give the plan up: `silo withdraw SITE`.",
        )
    newer_plan_id = find_successor(site, state.plan_id or "")
    if newer_plan_id is not None:
        raise ApprovalError(
            "retraining",
            expected=f"plan {state.plan_id} in force",
            got=f"plan {newer_plan_id}, signed in its place",
            remedy="Keep `silo run SITE` running: it takes the new plan, and trains for that.",
        )
    accepted = load_accepted(site, state.plan_id or "", state.plan_digest or "")
    cohort = stages.scan_images(site, accepted, policy)
    cost = retraining_cost(accepted, stages.open_ledger(site, policy), cohort.digest)
    return state, cost, cohort.digest != state.dataset_digest


def retrain(site: Site) -> State:
    """Go back to where the plan was accepted; what was debited for it stays in the ledger.

    Raises:
        BusyError, ApprovalError, DataError: see `assess_retraining`.
        BudgetError: noise for the present images would go over the budget; nothing was changed.
        DecisionLogError: the site's log of decisions is damaged.
    """
    with locked(site.private, "worker"):
        state, cost, _ = _assess(site)
        if not cost.affordable:
            raise BudgetError(
                "training again",
                expected=f"epsilon of at most {cost.left:.4g}, which is left",
                got=f"{cost.epsilon:.4g} for the present images",
                remedy=(
                    "Nothing was changed. Restore the images that were scanned, then `silo run SITE`, which "
                    "costs nothing; or raise privacy.budget_epsilon in policy.toml knowingly; or give the "
                    "plan up: `silo withdraw SITE`."
                ),
            )
        DecisionLog(site).add(RetrainingStarted(plan_id=state.plan_id or "", state=state.state))
        sequence = state.sequence
        if state.state == "refused":
            sequence += 1
        restarted = state.after(
            "retrain", sequence=sequence, submission_digest=None, dataset_digest=None, step=0
        )
        # What was made of the old images stays until the new ones are scanned: a crash before that loses nothing.
        save_state(state_path(site.private), restarted)
        approval_path(site).unlink(missing_ok=True)
        write_courier_status(site, restarted)
        return restarted
