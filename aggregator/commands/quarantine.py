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
    from aggregator.intake.quarantine import QuarantineEntry, Rule, Verdict

SiloArgument = Annotated[str, typer.Argument(metavar="SILO", help="The silo's id.")]
ReasonOption = Annotated[str, typer.Option(help="Why, for the record; 1 to 200 characters.")]
UnitsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Images or patients that its prior counts, if fewer than stated; published with --reason.",
    ),
]


def quarantine(
    fed: FederationArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """List submissions that wait for a decision, with reasons and figures beside those of the accepted experts."""
    from aggregator.intake.examination import Examiner
    from aggregator.intake.quarantine import quarantined_submissions
    from ddm.routers.evaluation import BANDS

    federation = Federation(fed).require()
    plan, _ = federation.current_plan()
    examiner, waiting = (
        Examiner(federation, plan),
        _undecided(federation, quarantined_submissions(federation, plan.plan_id)),
    )
    accepted = examiner.accepted()
    outliers = examiner.outliers(accepted)
    for silo_id, reason in _overweight(federation, accepted).items():
        outliers[silo_id] = [*outliers.get(silo_id, []), reason]
    figures = {silo_id: examiner.ratios(each) for silo_id, each in accepted.items()}
    if as_json:
        found = {"waiting": [each.record.model_dump(mode="json") for each in waiting]}
        say(json.dumps(found | {"accepted": figures, "accepted_outliers": outliers}))
        return
    for each in waiting:
        why = each.record
        say(f"{why.silo_id}, submission {why.sequence}, waiting since {why.at.isoformat()}:")
        for reason in why.reasons:
            say(f"  {reason}")
    for silo_id, reasons in outliers.items():
        say(f"{silo_id}, accepted, but an outlier by now:")
        for reason in reasons:
            say(f"  {reason}")
    if not waiting and not outliers:
        say("Nothing waits for a decision.")
    rows = [
        (expert, "accepted", *ratios)
        for silo in figures.values()
        for expert, ratios in silo.items()
    ]
    rows += [
        (expert, "waits", *ratios)
        for each in waiting
        for expert, ratios in each.record.figures.items()
    ]
    if rows:
        say("Loss on public images, as a multiple of that of answering 0:")
        say(table(rows, ("expert", "state", *(f"t {low:g}-{high:g}" for low, high in BANDS))))


def admit(
    fed: FederationArgument, silo: SiloArgument, reason: ReasonOption, units: UnitsOption = None
) -> None:
    """Accept what intake set aside, or lower what an accepted silo counts; `aggregator run` then signs the receipt."""
    federation = Federation(fed).require()
    waiting = _waiting(federation, silo)
    if waiting:
        counted = _counted(federation, silo, waiting.record.num_units, units)
        _record(
            federation,
            silo,
            waiting.record.submission_digest,
            "admitted",
            reason,
            counted,
            _shown(federation, waiting),
        )
        say(
            f"Admitted {silo}, submission {waiting.record.sequence}. `aggregator run {fed}` signs the receipt."
        )
        if counted < waiting.record.num_units:
            say(
                f"Its prior counts {counted} of the {waiting.record.num_units} that it states; the reason is published."
            )
        return
    from aggregator.intake.examination import Examiner
    from aggregator.intake.inventory import take_inventory

    examiner = Examiner(federation, federation.current_plan()[0])
    accepted = examiner.accepted()
    flagged: Mapping[Rule, Collection[str]] = {
        "stands_apart": examiner.outliers(accepted),
        "influence": _overweight(federation, accepted),
    }
    shown = [rule for rule, silos in flagged.items() if silo in silos]
    if silo not in accepted or not (shown or units):
        raise _nothing_waits(federation, silo)
    present = take_inventory(federation).silos[silo].counted.units
    counted = _counted(federation, silo, present, units)
    if not shown and counted == present:
        raise SetupError(
            "--units", expected=f"fewer than the {present} that {silo} counts as", got=f"{units}"
        )
    _record(federation, silo, accepted[silo].submission_digest, "admitted", reason, counted, shown)
    say(f"Admitted {silo} as it was accepted, counted as {counted}. Next: aggregator router {fed}")


def refuse(fed: FederationArgument, silo: SiloArgument, reason: ReasonOption) -> None:
    """Refuse what waits in quarantine; `aggregator run` then signs the refusal, and the silo learns the reason."""
    federation = Federation(fed).require()
    waiting = _waiting(federation, silo)
    if not waiting:
        raise _nothing_waits(federation, silo)
    _record(federation, silo, waiting.record.submission_digest, "refused", reason)
    say(
        f"Refused {silo}, submission {waiting.record.sequence}. `aggregator run {fed}` signs the refusal."
    )


def _undecided(federation: Federation, waiting: list["QuarantineEntry"]) -> list["QuarantineEntry"]:
    from aggregator.intake.quarantine import read_decisions

    decided = {decision.submission_digest for decision in read_decisions(federation)}
    return [each for each in waiting if each.record.submission_digest not in decided]


def _waiting(federation: Federation, silo_id: str) -> "QuarantineEntry | None":
    from aggregator.intake.quarantine import quarantined_submissions

    waiting = _undecided(
        federation, quarantined_submissions(federation, federation.current_plan()[0].plan_id)
    )
    return next((each for each in waiting if each.record.silo_id == silo_id), None)


def _overweight(federation: Federation, accepted: Collection[str]) -> dict[str, str]:
    """Describe which accepted silos hold too much of the prior by now and were not admitted."""
    from aggregator.intake.claims import overweight_words
    from aggregator.intake.inventory import take_inventory

    if not accepted:
        return {}
    inventory = take_inventory(federation)
    return overweight_words(federation, inventory.counted_units, inventory.digests)


def _shown(federation: Federation, waiting: "QuarantineEntry") -> "list[Rule] | None":
    """Return the rules by which a submission waits; None, which covers all, where their record is gone."""
    from aggregator.intake.claims import claim_faults
    from aggregator.intake.flags import flags_of

    why, (plan, _) = waiting.record, federation.current_plan()
    flags = flags_of(federation, why.plan_id, why.submission_digest).values()
    rules: set[Rule] = {rule for each in flags for rule in each}
    return sorted(rules | claim_faults(federation, plan, why.silo_id, why.num_units).keys()) or None


def _counted(federation: Federation, silo_id: str, claimed: int, units: int | None) -> int:
    """Return the number of units that an admitted silo counts as: at most what it states, and what was agreed."""
    from aggregator.intake.claims import agreed_units

    agreed = agreed_units(federation.current_plan()[0], silo_id)
    most = min(claimed, agreed)
    if units is not None and units > most:
        expected = f"at most {most}: {silo_id} states {claimed}, and {agreed} were agreed"
        raise SetupError("--units", expected=expected, got=f"{units}")
    return most if units is None else units


def _record(
    federation: Federation,
    silo_id: str,
    digest: str,
    verdict: "Verdict",
    reason: str,
    units: int | None = None,
    shown: "Sequence[Rule] | None" = None,
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
            shown=None if shown is None else tuple(shown),
            reason=reason,
            at=now_utc(),
        )
    except ValidationError as error:
        got = f"{len(reason)} characters" + (
            "" if reason.isprintable() else ", not all of them printable"
        )
        raise SetupError("--reason", expected="1 to 200 printable characters", got=got) from error
    record_decision(federation, decision)


def _nothing_waits(federation: Federation, silo_id: str) -> SetupError:
    return SetupError(
        f"silo {silo_id[:40]}",
        expected="a silo with a submission that waits for a decision",
        got="no submission of it in quarantine",
        remedy=f"List what waits: aggregator quarantine {federation.path}. To take out an accepted silo: "
        "aggregator withdraw.",
    )
