"""One island of one owner's data set: the document that a release holds in the place of a silo's submission.

An owner hides nothing from itself, so there is no noise, no budget and no ledger. The document is signed all the same,
with a key of the island's own, and parsed as strictly.
"""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Digest, File, NumImages, PlanId, ShortText, SiloId, Time
from ddm.protocol.federation import FederationDocument
from ddm.protocol.submission import SubmittedExpert


class Island(FederationDocument):
    """One island: its expert and its number of images.

    Attributes:
        silo_id: the island's name; a plan lists islands where it lists silos.
        num_units: its number of images.
        experts: its one expert.
        class_counts: its exact histogram over classes and groups; null in a plan that does not count classes.
        software: versions of the programs that made it.
    """

    format: Literal["archipelago/island/1"] = "archipelago/island/1"
    plan_id: PlanId
    plan_digest: Digest
    silo_id: SiloId
    created_at: Time
    num_units: Annotated[NumImages, Field(ge=2)]
    experts: Annotated[tuple[SubmittedExpert, ...], Field(min_length=1, max_length=1)]
    # Readers compute from these counts who holds a class, as they do from a silo's noised ones.
    class_counts: File | None = None
    software: Annotated[dict[ShortText, ShortText], Field(max_length=256)]
