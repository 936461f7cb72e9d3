"""Training again for a plan in work: what it costs, and how the site goes back to where the plan was accepted.

A refused submission may be sent again as it is, which costs nothing. What was mended in the images only counts once
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
from silo.decisions import DecisionLog, Retrained
from silo.plan.acceptance import AcceptedPlan, load_accepted
from silo.plan.succession import successor
from silo.privacy.ledger import Debit, Ledger
from silo.worker import stages
from silo.worker.approval import approval_path
from silo.worker.life import next_state
from silo.worker.state import State, load_state, save_state, state_path, write_courier_status

_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class RetrainingCost:
    """What training again costs.

    Attributes:
        epsilon: that noise for other images would add to what was spent.
        left: that the site's budget still holds.
        num_steps: of each expert.
    """

    epsilon: float
    left: float
    num_steps: int

    @property
    def affordable(self) -> bool:
        """Whether the budget covers it."""
        return self.epsilon <= self.left * _SLACK

    def __str__(self) -> str:
        over = "" if self.affordable else ", which the budget does not cover"
        return f"{self.num_steps} steps an expert, epsilon {self.epsilon:.3g} more of {self.left:.3g} left{over}"


def retraining_cost(
    accepted: AcceptedPlan, ledger: Ledger, dataset_digest: str | None = None
) -> RetrainingCost:
    """Return what it costs to train and draw again, for other images than before unless a digest names them."""
    delta = ledger.budget.delta
    debits = [entry.record for entry in ledger.entries if isinstance(entry.record, Debit)]
    steps = [tuple(debit.mechanisms.values()) for debit in debits]
    spent, paid = adaptive_epsilon(steps, delta), (accepted.digest, dataset_digest)
    more = 0.0
    if not any((debit.plan_digest, debit.dataset_digest) == paid for debit in debits):
        more = (
            adaptive_epsilon([*steps, tuple(paid_mechanisms(accepted.plan).values())], delta)
            - spent
        )
    num_steps = accepted.plan.expert.training.num_steps
    return RetrainingCost(more, max(ledger.budget.epsilon - spent, 0.0), num_steps)


def refused_remedy(state: State, accepted: AcceptedPlan, ledger: Ledger) -> str:
    """Say what may be tried after a refusal, and what each way costs."""
    if state.sequence >= MAX_SUBMISSIONS:
        return f"It was the last of {MAX_SUBMISSIONS} submissions to this plan. Keep `silo run` for the next plan."
    number, price = (
        f"submission {state.sequence + 1} of {MAX_SUBMISSIONS}",
        retraining_cost(accepted, ledger),
    )
    return (
        f"`silo run` sends the same experts again, as {number}: no training, no epsilon, a person approves. "
        f"After a change of the images: `silo retrain` ({price}). Or give the plan up: `silo withdraw`."
    )


def changed_images(
    state: State, accepted: AcceptedPlan, cohort: Cohort, ledger: Ledger
) -> DataError:
    """Return the error for images that are others than those scanned for this plan."""
    price = retraining_cost(accepted, ledger, cohort.digest)
    return DataError(
        "images",
        expected=f"those that were scanned for this plan, digest {(state.dataset_digest or 'none')[:16]}",
        got=f"digest {cohort.digest[:16]}",
        remedy=f"Train on the present ones: `silo retrain` ({price}). Or restore images, table and decisions of the "
        "time when they were scanned, then `silo run`. Or give the plan up: `silo withdraw`.",
    )


def assess_retraining(site: Site) -> tuple[State, RetrainingCost, bool]:
    """Read the images and say what training again would cost, and whether they changed; nothing is changed.

    Raises:
        BusyError: the worker is running.
        ApprovalError: no plan is in work, its submission was sent, or it was superseded.
        DataError: the images cannot be used.
    """
    with locked(site.private, "worker"):
        return _assess(site)


def _assess(site: Site) -> tuple[State, RetrainingCost, bool]:
    state, policy = load_state(state_path(site.private)), site.policy()
    next_state(state.state, "retrain")
    sent = (site.outbox / (state.plan_id or "") / str(state.sequence)).exists()
    if sent and state.state != "refused":  # the worker stopped between sending and recording it
        remedy = "Run it again: `silo run`, which waits for the receipt. Or give the plan up: silo withdraw."
        raise ApprovalError(
            "retraining", expected="a submission not sent", got="one in the outbox", remedy=remedy
        )
    if newer := successor(site, state.plan_id or ""):
        remedy = "Keep `silo run` running: it takes the new plan, and trains for that."
        got = f"plan {newer}, signed in its place"
        raise ApprovalError(
            "retraining", expected=f"plan {state.plan_id} in force", got=got, remedy=remedy
        )
    accepted = load_accepted(site, state.plan_id or "", state.plan_digest or "")
    cohort = stages.scan_images(site, accepted, policy)
    price = retraining_cost(accepted, stages.open_ledger(site, policy), cohort.digest)
    return state, price, cohort.digest != state.dataset_digest


def retrain(site: Site) -> State:
    """Go back to where the plan was accepted; what was debited for it stays in the ledger.

    Raises:
        BusyError, ApprovalError, DataError: see `assess`.
        BudgetError: noise for the present images would go over the budget; nothing was changed.
        DecisionLogError: the site's log of decisions is damaged.
    """
    with locked(site.private, "worker"):
        state, price, _ = _assess(site)
        if not price.affordable:
            raise BudgetError(
                "training again",
                expected=f"epsilon of at most {price.left:.4g}, which is left",
                got=f"{price.epsilon:.4g} for the present images",
                remedy="Nothing was changed. Restore the images that were scanned and `silo run`, which costs nothing; "
                "or raise privacy.budget_epsilon in policy.toml knowingly; or give the plan up: silo withdraw.",
            )
        DecisionLog(site).add(Retrained(plan_id=state.plan_id or "", state=state.state))
        sequence = state.sequence + (state.state == "refused")
        new = state.after(
            "retrain", sequence=sequence, submission_digest=None, dataset_digest=None, step=0
        )
        # what was made of the old images goes once the new ones are scanned
        save_state(state_path(site.private), new)
        approval_path(site).unlink(missing_ok=True)
        write_courier_status(site, new)
        return new
