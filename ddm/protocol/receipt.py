"""The aggregator's signed answer to a submission: accepted, refused, held for a person, or the silo was withdrawn."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Digest, Document, Model, PlanId, PositiveInt, ShortText, SiloId, Time


class AcceptedVerdict(Model):
    """The submission was verified and accepted."""

    kind: Literal["accepted"] = "accepted"


class RefusedVerdict(Model):
    """The submission was refused: the documented error code and one sentence."""

    kind: Literal["refused"] = "refused"
    code: PositiveInt
    reason: ShortText


class HeldVerdict(Model):
    """The submission was verified and waits for a person's decision; its receipt is still to come."""

    kind: Literal["held"] = "held"


class WithdrawnVerdict(Model):
    """The silo was withdrawn: later versions hold nothing of it, and its submissions are no longer accepted."""

    kind: Literal["withdrawn"] = "withdrawn"
    reason: ShortText


class Receipt(Document):
    """Binds the aggregator's answer to one plan, submission and sequence; sealed with the plan's receipt key."""

    format: Literal["archipelago/receipt/1"] = "archipelago/receipt/1"
    plan_id: PlanId
    plan_digest: Digest
    silo_id: SiloId
    sequence: PositiveInt
    # Null where nothing of the silo was opened: it withdrew before it submitted anything, or takes no longer part.
    submission_digest: Digest | None
    verdict: Annotated[
        AcceptedVerdict | RefusedVerdict | HeldVerdict | WithdrawnVerdict,
        Field(discriminator="kind"),
    ]
    at: Time


RECEIPT_KIND = "receipt"
MAX_RECEIPT_BYTES = 65536
