"""A silo's own word that it gave a plan up: signed with its key, so that nobody else can say it in its name."""

from typing import Literal

from ddm.protocol.base import PlanId, SiloId, Time
from ddm.protocol.federation import FederationDocument


class Leave(FederationDocument):
    """The silo takes no further part in the plan, and what it sent for it is to be left out of later versions."""

    format: Literal["archipelago/leave/1"] = "archipelago/leave/1"
    plan_id: PlanId
    silo_id: SiloId
    at: Time


# The kind is signed with the document, so that no sealed document of another kind passes for a leave.
LEAVE_KIND = "leave"
MAX_LEAVE_BYTES = 4096
LEAVE_NAME = "leave.json"
