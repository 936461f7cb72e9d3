"""Seals and opens a silo's word that it gave a plan up: the silo's own key must have signed it, for this plan."""

from datetime import datetime

from ddm.errors import ReplayError
from ddm.protocol.leave import LEAVE_KIND, MAX_LEAVE_BYTES, Leave
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import PublicKey, SigningKey


def seal_leave(plan_id: str, silo_id: str, key: SigningKey, now: datetime) -> bytes:
    """Sign that the silo gave the plan up."""
    return seal(Leave(plan_id=plan_id, silo_id=silo_id, at=now).encode(), LEAVE_KIND, key)


def open_leave(sealed: bytes, key: PublicKey, plan_id: str, silo_id: str) -> Leave:
    """Return the silo's word after checking its signature and what it names.

    Args:
        sealed: the bytes as received.
        key: the silo's signing key.
        plan_id: the plan that it must name.
        silo_id: the silo that it must name.

    Raises:
        SignatureError: another key has signed it.
        DocumentError: it is too large, malformed, or of another kind.
        ReplayError: it names another plan or silo.
    """
    payload, _ = open_sealed(sealed, LEAVE_KIND, key, MAX_LEAVE_BYTES)
    leave = Leave.parse(payload, subject="leave")
    if (leave.plan_id, leave.silo_id) != (plan_id, silo_id):
        expected = f"plan {plan_id}, silo {silo_id}"
        raise ReplayError(
            "leave", expected=expected, got=f"plan {leave.plan_id}, silo {leave.silo_id}"
        )
    return leave
