"""Stores the rules by which screening flagged a submission's experts; kept with the submission and published.

    screening/<plan_id>/<digest>.flags.json   every rule by which an expert was ever flagged, in quarantine or later

A flag decides nothing. On a published expert it records what the operator knew when admitting it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from aggregator.config import Federation
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, ExpertId, Model, PlanId
from ddm.protocol.manifest import ScreeningRule

Flags = Mapping[str, tuple[ScreeningRule, ...]]


class Fault(Model):
    """One implausible property of an expert: the rule, and a description with the figures."""

    expert_id: ExpertId
    flag: ScreeningRule
    words: str

    def __str__(self) -> str:
        return f"expert {self.expert_id}{self.words}"


class SubmissionFlags(Document):
    """The flagged experts of a submission, each with its rules."""

    format: Literal["archipelago/flags/1"] = "archipelago/flags/1"
    submission_digest: Digest
    experts: Mapping[ExpertId, tuple[ScreeningRule, ...]]


def flags_of(federation: Federation, plan_id: PlanId, digest: str) -> Flags:
    """Return the rules by which a submission's experts were flagged, by expert; empty if none was."""
    path = _flags_path(federation, plan_id, digest)
    if not path.is_file():
        return {}
    return SubmissionFlags.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name).experts


def remember_flags(
    federation: Federation, plan_id: PlanId, digest: str, faults: Iterable[Fault]
) -> None:
    """Add flags; earlier ones stay, since a person may have decided on them."""
    # Never removed: the manifest of a published expert must name what the operator knew when admitting it.
    before = flags_of(federation, plan_id, digest)
    flags_of_experts = {expert_id: set(flags) for expert_id, flags in before.items()}
    for fault in faults:
        flags_of_experts.setdefault(fault.expert_id, set()).add(fault.flag)
    experts = {expert_id: tuple(sorted(flags)) for expert_id, flags in flags_of_experts.items()}
    if experts != before:
        path = _flags_path(federation, plan_id, digest)
        write_atomic(path, SubmissionFlags(submission_digest=digest, experts=experts).encode())


def _flags_path(federation: Federation, plan_id: PlanId, digest: str) -> Path:
    return federation.screening / plan_id / f"{digest}.flags.json"
