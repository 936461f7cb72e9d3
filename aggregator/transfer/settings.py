"""What a run of the ServerApp carries: written by the process that starts Flower, read by the ServerApp."""

from typing import Annotated

from pydantic import Field

from aggregator.transfer.dispatcher import MAX_IN_FLIGHT
from ddm.protocol.base import Model, PlanId, PositiveInt, SiloId
from ddm.transport.messages import MAX_WAIT_S

RUN_SETTINGS_NAME = "run.json"


class RunSettings(Model):
    """flower/run.json: the plan to carry, and to whom.

    Attributes:
        plan_id: the plan.
        nodes: silo id to OpenSSH public key of its node.
        receipts_only: of these, the silos that the plan does not name: they get receipts for earlier plans alone.
        carried_from: of these, the silos whose experts the plan carries over, with the plan that they signed for.
        shard_bytes: most bytes in one message.
        max_submission_bytes: most bytes of one submission.
        wait_s: for how long a silo without news may hold back its answer.
        max_in_flight: most messages to one silo without a reply.
    """

    plan_id: PlanId
    nodes: dict[SiloId, str]
    receipts_only: tuple[SiloId, ...] = ()
    carried_from: dict[SiloId, PlanId] = Field(default_factory=dict)
    shard_bytes: PositiveInt
    max_submission_bytes: PositiveInt
    wait_s: int = Field(default=30, ge=0, le=MAX_WAIT_S)
    # The SuperLink keeps three times as many exchanges for each node (aggregator/runtime/superlink.py).
    max_in_flight: Annotated[int, Field(gt=0, le=MAX_IN_FLIGHT)] = MAX_IN_FLIGHT

    @property
    def silos_taking_part(self) -> list[SiloId]:
        """The silos that train for the plan, sorted."""
        return sorted(self.nodes.keys() - set(self.receipts_only))
