"""The commands `aggregator quarantine`, `admit` and `refuse`: show what screening set aside, and decide about it."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.system.console import say, table

if TYPE_CHECKING:
    from aggregator.intake.quarantine import QuarantineEntry, QuarantineVerdict, Rule

SiloArgument = Annotated[str, typer.Argument(metavar="SILO", help="The silo's id.")]
ReasonOption = Annotated[str, typer.Option(help="The reason, for the record; 1 to 200 characters.")]
UnitsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of images or patients for its prior, if fewer than stated; published with --reason.",
    ),
]


def quarantine(
    fed: FederationArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List the submissions that wait for a decision: reasons, and losses beside those of accepted experts."""
    from aggregator.intake.examination import Examiner
    from aggregator.intake.quarantine import quarantined_submissions
    from aggregator.membership.withdrawal import remaining_silos
    from ddm.routers.evaluation import BANDS

    federation = Federation(fed).require()
    plan, _ = federation.current_plan()
    waiting = _undecided(federation, quarantined_submissions(federation, plan.plan_id))
    examiner = Examiner(federation, plan)
    accepted = examiner.accepted(remaining_silos(federation, plan))
    # A silo that was accepted early is compared again with those that came later.
    outliers = examiner.outliers(accepted)
    for silo_id, reason in _overweight(federation, accepted).items():
        # A share of the prior grows when other silos withdraw or count as less.
        outliers[silo_id] = [*outliers.get(silo_id, []), reason]
    accepted_ratios = {silo_id: examiner.ratios(expert) for silo_id, expert in accepted.items()}

    if as_json:
        document = {
            "waiting": [entry.record.model_dump(mode="json") for entry in waiting],
            "accepted": accepted_ratios,
            "accepted_outliers": outliers,
        }
        say(json.dumps(document))
        return
    for entry in waiting:
        record = entry.record
        say(
            f"{record.silo_id}, submission {record.sequence}, waiting since {record.at.isoformat()}:"
        )
        for reason in record.reasons:
            say(f"  {reason}")
    for silo_id, reasons in outliers.items():
        say(f"{silo_id}, accepted, but an outlier by now:")
        for reason in reasons:
            say(f"  {reason}")
    if not waiting and not outliers:
        say("Nothing waits for a decision.")

    rows: list[tuple[object, ...]] = []
    for silo_ratios in accepted_ratios.values():
        for expert_id, ratios in silo_ratios.items():
            rows.append((expert_id, "accepted", *ratios))
    for entry in waiting:
        for expert_id, ratios in entry.record.figures.items():
            rows.append((expert_id, "waits", *ratios))
    if rows:
        bands = [f"t {low:g}-{high:g}" for low, high in BANDS]
        say("Loss on public images, as a multiple of that of answering 0:")
        say(table(rows, ("expert", "state", *bands)))


def admit(
    fed: FederationArgument, silo: SiloArgument, reason: ReasonOption, units: UnitsOption = None
) -> None:
    """Accept a quarantined submission, or lower the units of an accepted one; `aggregator run` signs the receipt."""
    federation = Federation(fed).require_owner()
    # Of a silo with a submission in quarantine and an accepted one, the one that waits is meant.
    waiting = _waiting(federation, silo)
    if waiting:
        _admit_quarantined(federation, waiting, reason, units)
    else:
        _admit_accepted(federation, silo, reason, units)


def _admit_quarantined(
    federation: Federation, waiting: "QuarantineEntry", reason: str, units: int | None
) -> None:
    """Admit a submission that waits, in spite of the rules for which it waits."""
    record = waiting.record
    counted_units = _counted_units(federation, record.silo_id, record.num_units, units)
    # The decision records which rules the operator knew of: one that applies later asks again (docs/adr/0068).
    rules = _rules_shown(federation, waiting)
    _record(
        federation,
        record.silo_id,
        record.submission_digest,
        "admitted",
        reason,
        counted_units,
        rules,
    )
    say(
        f"Admitted {record.silo_id}, submission {record.sequence}. "
        f"`aggregator run {federation.path}` signs the receipt."
    )
    if counted_units < record.num_units:
        say(
            f"Its prior counts {counted_units} of the {record.num_units} that it states; the reason is published."
        )


def _admit_accepted(federation: Federation, silo_id: str, reason: str, units: int | None) -> None:
    """Admit an accepted silo in spite of a rule that applies by now, or lower its units."""
    from aggregator.intake.examination import Examiner
    from aggregator.intake.inventory import take_inventory
    from aggregator.membership.withdrawal import remaining_silos

    plan, _ = federation.current_plan()
    examiner = Examiner(federation, plan)
    accepted = examiner.accepted(remaining_silos(federation, plan))
    flagged_silos: Mapping[Rule, Collection[str]] = {
        "stands_apart": examiner.outliers(accepted),
        "influence": _overweight(federation, accepted),
    }
    # An admission covers the rules that apply now and no later ones (ADR 0068).
    rules = [rule for rule, silos in flagged_silos.items() if silo_id in silos]
    if silo_id not in accepted or not (rules or units):
        raise _nothing_waits(federation, silo_id)
    # An earlier admission may have lowered the number already.
    present_units = take_inventory(federation).silos[silo_id].counted.units
    counted_units = _counted_units(federation, silo_id, present_units, units)
    if not rules and counted_units == present_units:
        raise SetupError(
            "--units",
            expected=f"fewer than the {present_units} that {silo_id} counts as",
            got=f"{units}",
        )
    submission_digest = accepted[silo_id].submission_digest
    _record(federation, silo_id, submission_digest, "admitted", reason, counted_units, rules)
    say(
        f"Admitted {silo_id} as it was accepted, counted as {counted_units}. "
        f"Next: aggregator release {federation.path} --out RELEASE"
    )


def refuse(fed: FederationArgument, silo: SiloArgument, reason: ReasonOption) -> None:
    """Refuse a quarantined submission; `aggregator run` signs the refusal, and the silo receives the reason."""
    federation = Federation(fed).require_owner()
    waiting = _waiting(federation, silo)
    if not waiting:
        raise _nothing_waits(federation, silo)
    _record(federation, silo, waiting.record.submission_digest, "refused", reason)
    say(
        f"Refused {silo}, submission {waiting.record.sequence}. `aggregator run {fed}` signs the refusal."
    )


def _undecided(federation: Federation, entries: list["QuarantineEntry"]) -> list["QuarantineEntry"]:
    from aggregator.intake.quarantine import read_decisions

    # A decision takes effect when `aggregator run` signs the receipt; until then the entry stays in quarantine.
    decided = {decision.submission_digest for decision in read_decisions(federation)}
    return [entry for entry in entries if entry.record.submission_digest not in decided]


def _waiting(federation: Federation, silo_id: str) -> "QuarantineEntry | None":
    from aggregator.intake.quarantine import quarantined_submissions

    plan, _ = federation.current_plan()
    # A silo sends its next submission after the receipt of this one, so that at most one of them waits.
    for entry in _undecided(federation, quarantined_submissions(federation, plan.plan_id)):
        if entry.record.silo_id == silo_id:
            return entry
    return None


def _overweight(federation: Federation, accepted: Collection[str]) -> dict[str, str]:
    """Describe which accepted silos hold too much of the prior by now and were not admitted."""
    from aggregator.intake.claims import overweight_words
    from aggregator.intake.inventory import take_inventory

    if not accepted:
        return {}
    inventory = take_inventory(federation)
    return overweight_words(federation, inventory.counted_units, inventory.digests)


def _rules_shown(federation: Federation, waiting: "QuarantineEntry") -> "list[Rule] | None":
    """Return the rules for which a submission waits; None, which covers all rules, where their record is gone."""
    from aggregator.intake.claims import claim_faults
    from aggregator.intake.flags import flags_of
    from aggregator.membership.withdrawal import remaining_silos

    record = waiting.record
    plan, _ = federation.current_plan()
    remaining = remaining_silos(federation, plan)
    faults = claim_faults(federation, plan, record.silo_id, record.num_units, remaining)
    rules: set[Rule] = set(faults)
    for expert_rules in flags_of(federation, record.plan_id, record.submission_digest).values():
        rules.update(expert_rules)
    return sorted(rules) or None


def _counted_units(
    federation: Federation, silo_id: str, stated_units: int, units: int | None
) -> int:
    """Return the number of units that an admitted silo counts as: at most what it states, and what was agreed."""
    from aggregator.intake.claims import agreed_units

    plan, _ = federation.current_plan()
    agreed = agreed_units(plan, silo_id)
    # A decision may take influence from a silo, and never give it more than it signed and was agreed.
    max_units = min(stated_units, agreed)
    if units is None:
        return max_units
    if units > max_units:
        raise SetupError(
            "--units",
            expected=f"at most {max_units}: {silo_id} states {stated_units}, and {agreed} were agreed",
            got=f"{units}",
        )
    return units


def _record(
    federation: Federation,
    silo_id: str,
    digest: str,
    verdict: "QuarantineVerdict",
    reason: str,
    units: int | None = None,
    rules: "Sequence[Rule] | None" = None,
) -> None:
    from pydantic import ValidationError

    from aggregator.intake.quarantine import QuarantineDecision, record_decision
    from ddm.protocol.base import now_utc

    plan, _ = federation.current_plan()
    try:
        decision = QuarantineDecision(
            plan_id=plan.plan_id,
            silo_id=silo_id,
            submission_digest=digest,
            verdict=verdict,
            units=units,
            shown=None if rules is None else tuple(rules),
            reason=reason,
            at=now_utc(),
        )
    except ValidationError as error:
        # Only the reason is free text; everything else comes from verified documents.
        got = f"{len(reason)} characters"
        if not reason.isprintable():
            got += ", not all of them printable"
        raise SetupError("--reason", expected="1 to 200 printable characters", got=got) from error
    record_decision(federation, decision)


def _nothing_waits(federation: Federation, silo_id: str) -> SetupError:
    return SetupError(
        f"silo {silo_id[:40]}",
        expected="a silo with a submission that waits for a decision",
        got="no submission of it in quarantine",
        remedy=(
            f"List what waits: `aggregator quarantine {federation.path}`. To take out an accepted "
            f"silo: `aggregator withdraw {federation.path} SILO --reason TEXT`."
        ),
    )
