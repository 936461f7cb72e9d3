"""From what was measured on one expert to a verdict and its reason."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm.audit.membership import Membership
from ddm.evaluation.intervals import Estimate
from ddm.protocol.limits import Audit, Verdict

_MIN_CONTROL_COPIES = 0.9


@dataclass(frozen=True)
class _LimitedFigure:
    """A figure of the expert, and the most that the plan allows.

    Attributes:
        compares_sides: whether it compares members with units held out.
    """

    name: str
    estimate: Estimate
    limit: float
    compares_sides: bool = False


@dataclass(frozen=True)
class MeasuredLeaks:
    """All that was measured on one expert.

    Attributes:
        num_holdout: units held out that are not duplicates of training images.
        membership: the attacks on the expert.
        control: the same attacks on a copy of it that was overfitted to a few of the members, which alone count there.
        sides_alike: whether members and units held out look the same to an expert that learned neither.
        copies: by space, the share of samples that are near copies.
        control_copies: by space, the share of slightly blurred training images that were recognised as near copies.
    """

    num_holdout: int
    membership: Membership
    control: Membership
    sides_alike: bool
    copies: Mapping[str, Estimate]
    control_copies: Mapping[str, float]


def judge(findings: MeasuredLeaks, limits: Audit) -> tuple[Verdict, str]:
    """Compare the figures of an expert with a plan's limits.

    It fails if a figure is above its limit, and passes if the upper end of every interval is within it and the controls
    worked. In between, the audit is inconclusive. Where members and held-out units differ by themselves, an attack
    fails the expert only if its whole interval is above the limit.
    """
    too_few = too_few_units(findings.num_holdout, limits)
    if too_few:
        return "inconclusive", too_few
    # A failure first: whether the controls worked does not matter where the attacks themselves did.
    figures = _figures(findings, limits)
    for figure in figures:
        deciding_value = figure.estimate.value
        if figure.compares_sides and not findings.sides_alike:
            # The held-out units are drawn at random (ADR 0054), so that sides that differ do so by chance, and little:
            # they may move a figure within its interval, and not the whole interval above the limit.
            deciding_value = figure.estimate.low
        if deciding_value > figure.limit:
            value = _in_words(figure.estimate)
            return "fail", f"{figure.name} is {value}; the plan allows {figure.limit:g}"

    if not findings.sides_alike:
        reason = (
            "an expert that learned neither side tells members from held-out units: they differ"
        )
        return "inconclusive", reason

    # Then the controls: an attack that misses an overfitted copy would miss a leak too.
    # The lower end counts, since so few units reach a high value by chance.
    control_auc = findings.control.worst.auc
    if control_auc.low <= limits.max_mia_auc:
        value = _in_words(control_auc)
        reason = f"no attack detects a copy that is overfitted to a few images: AUC {value} at most"
        return "inconclusive", reason
    for space, share in findings.control_copies.items():
        if share < _MIN_CONTROL_COPIES:
            reason = f"only {share:.0%} of blurred training images count as copies in {space}"
            return "inconclusive", reason

    for figure in figures:
        if figure.estimate.high > figure.limit:
            value = _in_words(figure.estimate)
            reason = (
                f"{figure.name} is {value}: too few units or samples for the limit {figure.limit:g}"
            )
            return "inconclusive", reason
    return "pass", "; ".join(f"{figure.name} {_in_words(figure.estimate)}" for figure in figures)


def too_few_units(num_holdout: int, limits: Audit) -> str:
    """Return why so few units held out give no verdict; empty if there are enough."""
    if num_holdout >= limits.min_holdout_units:
        return ""
    return f"{num_holdout} held-out units; the plan needs {limits.min_holdout_units} to measure leakage"


def _figures(findings: MeasuredLeaks, limits: Audit) -> list[_LimitedFigure]:
    worst = findings.membership.worst
    sharpest = findings.membership.sharpest
    figures = [
        _LimitedFigure(
            f"AUC of the {worst.name}",
            worst.auc,
            limits.max_mia_auc,
            compares_sides=True,
        ),
        _LimitedFigure(
            f"share found at 1% false positives by the {sharpest.name}",
            sharpest.tpr,
            limits.max_mia_tpr,
            compares_sides=True,
        ),
    ]
    for space, share in findings.copies.items():
        name = f"share of near copies in {space}"
        figures.append(_LimitedFigure(name, share, limits.max_near_copy_rate))
    return figures


def _in_words(estimate: Estimate) -> str:
    # Four digits: a limit of 0.6 and an end of 0.6004 must not look alike.
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g})"
