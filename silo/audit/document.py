"""The leak audit's report as a document, read without torch."""

import secrets
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.io.files import read_bounded
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Digest,
    Document,
    ExpertId,
    Model,
    NaturalInt,
    PlanId,
    ShortText,
)
from ddm.protocol.limits import Verdict

_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Figure(Model):
    """A measured share, with its 95% interval."""

    name: ShortText
    value: _Share
    low: _Share
    high: _Share


class ExpertAudit(Model):
    """What was measured on one expert.

    Attributes:
        verdict: on it.
        reason: for it.
        num_members: units trained on that were attacked.
        num_holdout_units: units held out that are not duplicates of training images.
        deciding_auc: of the attacks that decide, chosen on some units and measured on others.
        deciding_tpr: share of members that they find at 1% false positives.
        auc: of each attack by itself.
        tpr: share of members that each finds at 1% false positives.
        copies: share of samples that are near copies, by space.
        control: the larger AUC of the deciding attacks on the overfitted copy.
        unseen: whether members and units held out look the same to an expert that learned neither.
        num_samples: the number of samples drawn.
    """

    expert_id: ExpertId
    verdict: Verdict
    reason: ShortText
    num_members: NaturalInt = 0
    num_holdout_units: NaturalInt
    deciding_auc: Annotated[tuple[Figure, ...], Field(max_length=16)] = ()
    deciding_tpr: Annotated[tuple[Figure, ...], Field(max_length=16)] = ()
    auc: Annotated[tuple[Figure, ...], Field(max_length=256)] = ()
    tpr: Annotated[tuple[Figure, ...], Field(max_length=256)] = ()
    copies: Annotated[tuple[Figure, ...], Field(max_length=16)] = ()
    control: Figure | None = None
    unseen: bool | None = None
    num_samples: NaturalInt = 0


class AuditReport(Document):
    """The measurement and its verdict. It stays on the site; only its digest leaves, which the salt makes meaningless.

    Attributes:
        num_holdout_units: the number of units that the site holds out.
        salt: random, so that nobody can try reports against the digest.
        experts: the audit of each expert, where there was one.
    """

    format: Literal["archipelago/audit/1"] = "archipelago/audit/1"
    plan_id: PlanId
    verdict: Verdict
    num_holdout_units: NaturalInt
    reason: ShortText
    salt: Digest = Field(default_factory=lambda: secrets.token_hex(32))
    experts: Annotated[tuple[ExpertAudit, ...], Field(max_length=4096)] = ()


def read_report(path: Path) -> AuditReport:
    """Read a report.

    Raises:
        MissingFileError, DocumentError: it is not there, or damaged.
    """
    return AuditReport.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name)
