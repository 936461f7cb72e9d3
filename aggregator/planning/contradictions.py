"""Compares a drafted plan with all that is known before it is signed: its own numbers, cards, settings, estimates.

Rules alone, without file, network or clock. A refusal is for a plan that silos or intake would refuse, or that could
not be carried out on any device; a warning is for one that works in some places only, or that says less than it seems
to. `aggregator.planning.feasible` has the rules that need no more than recipe and cards, which come before anything is
fitted. docs/how-to/run-an-aggregator.md lists both.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from aggregator.intake.claims import overweight
from aggregator.planning.cost import Cost
from ddm.limits import BrokenRule, rules_of_limits
from ddm.protocol.enrolment import Card
from ddm.protocol.plan import Plan
from ddm.statistics.histograms import discrete_laplace_std
from ddm.system.console import human_seconds
from ddm.system.findings import Finding, FindingLevel

_MAX_CHARACTERS = 400  # of a list of silos or devices in a message


@dataclass(frozen=True)
class DraftedPlan:
    """A plan before it is signed, and what it is compared with.

    Attributes:
        plan: the plan.
        cards: the cards of the silos that train, by their names.
        max_influence: of federation.toml.
        cost: what the plan costs each silo.
    """

    plan: Plan
    cards: Mapping[str, Card]
    max_influence: float
    cost: Cost

    def units(self) -> dict[str, int]:
        """Return the most units of each silo, carried ones included."""
        unit = self.plan.statistics.unit
        return {silo_id: self.plan.agreed[silo_id].units(unit) for silo_id in self.plan.members}

    def training_units(self) -> dict[str, int]:
        """Return the most units of each silo that trains."""
        units = self.units()
        return {silo_id: units[silo_id] for silo_id in self.plan.silos}


def find_contradictions(drafted: DraftedPlan) -> tuple[Finding, ...]:
    """Return the contradictions of a draft, refusals first; empty where everything agrees."""
    findings: list[Finding] = []
    for rule in (
        _beyond_a_policy,
        _too_little_time,
        _too_much_influence,
        _too_few_gpu_hours,
        _audit_that_cannot_measure,
        _delta_of_one_unit,
        _counts_below_their_noise,
        _private_steps_of_everybody,
    ):
        findings += rule(drafted)
    # The sort is stable, so that the rules keep their order within each level.
    return tuple(sorted(findings, key=lambda finding: finding.level != "fail"))


def _beyond_a_policy(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find limits of the silos' policies that the plan exceeds, by the rules that the silos themselves will apply."""
    silos_of_rules: dict[BrokenRule, list[str]] = {}
    # Most silos keep the default policy. Silos with the same limits and the same size break the same rules.
    rules_of_cards: dict[tuple[object, object], list[BrokenRule]] = {}
    for silo_id, card in drafted.cards.items():
        terms = (card.limits, drafted.plan.agreed[silo_id])
        if terms not in rules_of_cards:
            rules_of_cards[terms] = list(rules_of_limits(drafted.plan, card.limits, silo_id))
        for rule in rules_of_cards[terms]:
            silos_of_rules.setdefault(rule, []).append(silo_id)
    for rule, silo_ids in silos_of_rules.items():
        yield Finding(
            rule.subject,
            expected=rule.allowed,
            got=f"{rule.required}; refused by {_listed(silo_ids)}, by their cards",
            remedy=(
                "Change the recipe. Or agree with these silos on another policy.toml (for memory also "
                "accumulate in silo.toml), of which they make a new card, `silo enroll SITE --out "
                "card.json`, which you take in with `aggregator enroll FED CARD`. Or take them out: "
                "`aggregator remove FED SILO --reason TEXT`."
            ),
        )


def _too_little_time(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find a training that takes longer than the plan lets it take."""
    limit_s = drafted.plan.limits.train_s
    seconds_on = {estimate.device.name: estimate.train_s for estimate in drafted.cost.on_devices}
    seconds_on["one thread of this machine"] = drafted.cost.train_s
    too_slow = {name: seconds for name, seconds in seconds_on.items() if seconds > limit_s}
    if not too_slow:
        return
    level: FindingLevel = "warn"
    if len(too_slow) == len(seconds_on):
        level = "fail"
    times = [f"{human_seconds(seconds)} on {name}" for name, seconds in too_slow.items()]
    yield Finding(
        "limits.train_s",
        expected=f"at least as long as the experts of one silo train; it is {human_seconds(limit_s)}",
        got=f"about {_listed(times)}",
        remedy="Raise limits.train_s, train for fewer steps, or choose a smaller architecture. A silo stops a training "
        "that takes longer.",
        level=level,
    )


def _too_much_influence(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find a silo that would hold more of the prior than the federation lets one silo hold."""
    units = drafted.units()
    max_influence = drafted.max_influence
    total = sum(units.values())
    waits_in_quarantine = overweight(units, max_influence)
    for silo_id, num_units in units.items():
        share = num_units / total
        # A card states a number rounded up to a power of two: a silo that was counted has more than half of it.
        surely_held = num_units / 2 / (total - num_units / 2)
        is_sure = surely_held > max_influence
        if silo_id not in waits_in_quarantine and not is_sure:
            continue
        level: FindingLevel = "warn"
        # A carried submission was accepted already, perhaps by a person who knew its share.
        if silo_id in waits_in_quarantine and is_sure and silo_id in drafted.plan.silos:
            level = "fail"
        consequence = "its submission waits in quarantine (aggregator admit)"
        if silo_id not in waits_in_quarantine:
            consequence = (
                "with so few silos no submission waits, and most samples come from this silo"
            )
        yield Finding(
            "max_influence",
            expected=f"no silo with more than {max_influence:.0%} of the prior (federation.toml)",
            got=f"{silo_id} with up to {share:.0%}; {consequence}",
            remedy=(
                "If this share is known and wanted, raise max_influence in federation.toml. Otherwise "
                "agree on a smaller number by a new card (`silo enroll SITE --out card.json --images N`, "
                "or --patients), which you take in with `aggregator enroll FED CARD`, or enroll more "
                "silos."
            ),
            level=level,
        )


def _too_few_gpu_hours(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find a plan that states fewer GPU hours than its training takes on the fastest GPU; nobody measures them."""
    stated_hours = drafted.plan.limits.gpu_hours
    fastest = min(drafted.cost.on_devices, key=lambda estimate: estimate.train_s)
    hours = fastest.train_s / 3600
    # A plan for processors alone states no GPU hours.
    if stated_hours == 0 or hours <= stated_hours:
        return
    yield Finding(
        "limits.gpu_hours",
        expected=f"at least {hours:.3g}, as training takes on {fastest.device.name}",
        got=f"{stated_hours:g}",
        remedy="Raise limits.gpu_hours: silos compare it with their policies, and plan their machines by it.",
        level="warn",
    )


def _audit_that_cannot_measure(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find silos that hold out too few units for a verdict on their experts."""
    audit = drafted.plan.audit
    # The weights of a privately trained expert are bounded by their epsilon instead.
    if not audit.required or drafted.plan.expert.privacy is not None:
        return
    units = drafted.training_units()
    held_out = {}
    for silo_id, card in drafted.cards.items():
        own_audit = card.limits.audit
        num_held_out = own_audit.num_holdout_units(units[silo_id])
        if num_held_out < audit.min_holdout_units:
            held_out[silo_id] = num_held_out
    if not held_out:
        return
    sizes = [f"{silo_id} holds out {num} of {units[silo_id]}" for silo_id, num in held_out.items()]
    yield Finding(
        "audit.min_holdout_units",
        expected=f"at least {audit.min_holdout_units} {drafted.plan.statistics.unit}s held out at each silo",
        got=_listed(sizes),
        remedy=(
            "The leak audit of these silos will be inconclusive: their experts leave with a waiver "
            "(`silo waive SITE --role ROLE --reason TEXT --until DAY`), or are trained privately "
            "([expert.privacy])."
        ),
        level="warn",
    )


def _delta_of_one_unit(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find a delta that would allow publishing a unit as it is."""
    spends = drafted.plan.spends
    num_units = max(drafted.training_units().values())
    # Publishing one unit in n, drawn by chance, is (0, 1/n) private.
    if spends.delta * num_units < 1:
        return
    unit = drafted.plan.statistics.unit
    yield Finding(
        "statistics.total.delta",
        expected=f"well below {1 / num_units:.2g}, one over the {num_units} {unit}s of the largest silo",
        got=f"{spends.delta:g}",
        remedy=f"Lower delta: this value would allow a mechanism that publishes one whole {unit}.",
        level="warn",
    )


def _counts_below_their_noise(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find silos whose histogram has more noise than units in a cell."""
    counts = drafted.plan.statistics.counts
    noise = discrete_laplace_std(counts.epsilon)
    drowned = {
        silo_id: num_units / counts.num_groups
        for silo_id, num_units in drafted.training_units().items()
        if num_units / counts.num_groups < noise
    }
    if not drowned:
        return
    means = [f"{silo_id} has at most {mean:.2g}" for silo_id, mean in drowned.items()]
    yield Finding(
        "statistics.counts",
        expected=f"more units in a cell, on average, than the noise of {noise:.2g}",
        got=_listed(means),
        remedy="Choose fewer groups (num_groups) or a larger epsilon: the router learns almost "
        "nothing about these silos.",
        level="warn",
    )


def _private_steps_of_everybody(drafted: DraftedPlan) -> Iterator[Finding]:
    """Find silos with fewer units than a step of private training takes: chance would hide none of them."""
    terms = drafted.plan.expert.privacy
    if terms is None:
        return
    small = {
        silo_id: num_units
        for silo_id, num_units in drafted.training_units().items()
        if num_units <= terms.units_per_step
    }
    if not small:
        return
    sizes = [f"{silo_id} has at most {num}" for silo_id, num in small.items()]
    yield Finding(
        "expert.privacy.units_per_step",
        expected="fewer units than each silo has, since each step takes some of them at random",
        got=f"{terms.units_per_step}; {_listed(sizes)}",
        remedy="Lower units_per_step: where every unit is in every step, the same epsilon needs far more noise.",
        level="warn",
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)[:_MAX_CHARACTERS]
