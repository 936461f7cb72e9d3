"""From what was measured on one expert to a verdict and its reason."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm.audit.membership import Membership
from ddm.evaluation.intervals import Estimate
from ddm.protocol.limits import Audit, Verdict

_ENOUGH_COPIES = 0.9


@dataclass(frozen=True)
class Findings:
    """All that was measured on one expert.

    Attributes:
        num_holdout: units held out that are no duplicates of training images.
        membership: the attacks on the expert.
        control: the same attacks on a copy of it that was overfitted to a few of the members, which alone count there.
        unseen: whether an expert that learned neither side takes members and units held out for the same.
        copies: by space, the share of samples that are near copies.
        control_copies: by space, the share of slightly blurred training images that were found to be near copies.
    """

    num_holdout: int
    membership: Membership
    control: Membership
    unseen: bool
    copies: Mapping[str, Estimate]
    control_copies: Mapping[str, float]


def judge(found: Findings, limits: Audit) -> tuple[Verdict, str]:
    """Hold an expert against a plan's limits.

    It fails if a figure is above its limit, and passes if the upper end of every interval is within it and the controls
    worked. In between, the audit cannot tell.
    """
    if short := too_few(found.num_holdout, limits):
        return "inconclusive", short
    if not found.unseen:
        return (
            "inconclusive",
            "an expert that learned neither side tells members from held-out units: they differ",
        )
    figures = _figures(found, limits)
    for what, estimate, most in figures:
        if estimate.value > most:
            return "fail", f"{what} is {_in_words(estimate)}; the plan allows {most:g}"
    seen = found.control.worst.auc
    if seen.value <= limits.max_mia_auc:
        return (
            "inconclusive",
            f"no attack sees a copy overfitted to a few images: AUC {_in_words(seen)} at most",
        )
    for space, share in found.control_copies.items():
        if share < _ENOUGH_COPIES:
            return (
                "inconclusive",
                f"only {share:.0%} of blurred training images count as copies in {space}",
            )
    for what, estimate, most in figures:
        if estimate.high > most:
            return (
                "inconclusive",
                f"{what} is {_in_words(estimate)}: too few units or samples for the limit {most:g}",
            )
    return "pass", "; ".join(f"{what} {_in_words(estimate)}" for what, estimate, _ in figures)


def too_few(num_holdout: int, limits: Audit) -> str:
    """Return why so few units held out cannot tell; empty if they can."""
    if num_holdout >= limits.min_holdout_units:
        return ""
    return f"{num_holdout} held-out units; the plan needs {limits.min_holdout_units} to measure leakage"


def _figures(found: Findings, limits: Audit) -> list[tuple[str, Estimate, float]]:
    worst, sharpest = found.membership.worst, found.membership.sharpest
    figures = [
        (f"AUC of the attack {worst.name}", worst.auc, limits.max_mia_auc),
        (f"share found at 1% false positives by {sharpest.name}", sharpest.tpr, limits.max_mia_tpr),
    ]
    return figures + [
        (f"share of near copies in {space}", share, limits.max_near_copy_rate)
        for space, share in found.copies.items()
    ]


def _in_words(estimate: Estimate) -> str:
    return f"{estimate.value:.3g} ({estimate.low:.3g} to {estimate.high:.3g})"
