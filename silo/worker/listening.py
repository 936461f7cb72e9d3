"""Listens for what the aggregator says of a plan, in work or answered, and says what it means for the site."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddm.errors import ArchipelagoError, SubmissionRefusedError
from silo.config import Policy, Site
from silo.plan.acceptance import AcceptedPlan, load_accepted
from silo.worker import stages
from silo.worker.life import AT_WORK, Event
from silo.worker.receipts import heard, listens, problem_of
from silo.worker.retraining import refused_remedy
from silo.worker.state import State

_log = logging.getLogger(__name__)
_CHANGES: Mapping[Event, Mapping[str, bool]] = {
    "hold": {"held": True},
    "notice": {"confirmed": True},
}


@dataclass(frozen=True)
class Word:
    """A new word of the aggregator.

    Attributes:
        event: of the plan's life.
        changes: other fields of the state that change with it.
        problem: what a person must know of it, if anything.
        ends: whether that ends the worker: the work on the plan was for nothing.
    """

    event: Event
    changes: Mapping[str, bool]
    problem: SubmissionRefusedError | None
    ends: bool


@dataclass
class Listener:
    """Looks again and again whether there is a new word.

    Attributes:
        site: the silo's folder.
        policy: its policy.
    """

    site: Site
    policy: Policy
    _deaf_to: set[str] = field(default_factory=set)

    def word(self, state: State) -> Word | None:
        """Return the aggregator's word that the state does not know yet; None where there is none.

        A plan that is answered is listened to for a notice alone. Where the site's copy of it is damaged, that is
        logged once, and the site goes on to the next plan: only what is in work needs its plan.

        Raises:
            ArchipelagoError: the copy of the plan in work is damaged.
        """
        if not listens(state):
            return None
        try:
            accepted = load_accepted(self.site, state.plan_id or "", state.plan_digest or "")
        except ArchipelagoError as error:
            if state.state in AT_WORK:
                raise
            self._say_damaged(state, error)
            return None
        if (said := heard(self.site, state, accepted.plan)) is None:
            return None
        remedy = self._refused_remedy(state, accepted) if said.event == "refusal" else ""
        problem = problem_of(said, state, remedy)
        ends = problem is not None and state.state in AT_WORK
        own = state.state == "withdrawn"  # of its own accord, so that the notice only confirms it
        return Word(said.event, _CHANGES.get(said.event, {}), None if own else problem, ends)

    def _refused_remedy(self, state: State, accepted: AcceptedPlan) -> str:
        return refused_remedy(state, accepted, stages.open_ledger(self.site, self.policy))

    def _say_damaged(self, state: State, error: ArchipelagoError) -> None:
        if (plan_id := state.plan_id or "") in self._deaf_to:
            return
        self._deaf_to.add(plan_id)
        _log.warning(
            "this site's copy of the earlier plan %s is damaged (%s): notices about it are not heard, and no later "
            "plan can train on its experts, until private/plans/%s is restored from backup",
            plan_id,
            error,
            plan_id,
        )
