"""What screening found of a submission's experts, by rule: kept for as long as the submission is, and published.

    screening/<plan_id>/<digest>.flags.json   every rule by which an expert was ever flagged, in quarantine or later

A flag decides nothing. It says of an expert that a person admitted what the person was asked about.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from aggregator.config import Federation
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, ExpertId, Model, PlanId
from ddm.protocol.manifest import Flag

Flags = Mapping[str, tuple[Flag, ...]]


class Fault(Model):
    """One thing that is implausible of an expert: by which rule, and in words with the figures."""

    expert_id: ExpertId
    flag: Flag
    words: str

    def __str__(self) -> str:
        return f"expert {self.expert_id}{self.words}"


class Flagged(Document):
    """Which experts of a submission were flagged, and by which rules."""

    format: Literal["archipelago/flags/1"] = "archipelago/flags/1"
    submission_digest: Digest
    experts: Mapping[ExpertId, tuple[Flag, ...]]


def flags_of(federation: Federation, plan_id: PlanId, digest: str) -> Flags:
    """Return the rules by which a submission's experts were flagged, by expert; nothing where none was."""
    path = federation.screening / plan_id / f"{digest}.flags.json"
    if not path.is_file():
        return {}
    return Flagged.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name).experts


def remember_flags(federation: Federation, plan_id: PlanId, digest: str, faults: Iterable[Fault]) -> None:
    """Add what was found; what was found before stays, since a person may have decided on it."""
    before = flags_of(federation, plan_id, digest)
    found = {expert_id: set(flags) for expert_id, flags in before.items()}
    for fault in faults:
        found.setdefault(fault.expert_id, set()).add(fault.flag)
    experts = {expert_id: tuple(sorted(flags)) for expert_id, flags in found.items()}
    if experts != before:
        path = federation.screening / plan_id / f"{digest}.flags.json"
        write_atomic(path, Flagged(submission_digest=digest, experts=experts).encode())
