"""A person's acceptance of a plan that contains networks: weights from elsewhere that will process private images.

Whatever such a network computes of an image stays on the site or is noised, but it runs where the images are. The
worker waits in its present state, so that nobody outside sees more than that no plan was accepted yet.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from ddm.errors import ApprovalError
from ddm.io.files import write_atomic
from ddm.protocol.architecture import TextCondition
from ddm.protocol.base import MAX_TEXT, Digest, Document, PlanId, ShortText
from ddm.protocol.encoder import TimmEncoderSpec
from ddm.protocol.latent import Autoencoder
from ddm.protocol.plan import Plan
from silo.config import Policy, Site

_MAX_BYTES = 65536


class WaitingPlan(Document):
    """A plan that verified and fits the policy, and waits for a person."""

    plan_id: PlanId
    plan_digest: Digest
    networks: tuple[ShortText, ...] = Field(max_length=16)

    @property
    def in_words(self) -> str:
        """The networks that it contains."""
        return ", ".join(self.networks) or "no network"


class PlanConsent(Document):
    """What `silo accept` leaves for the worker."""

    plan_digest: Digest


def networks_of(plan: Plan) -> Iterator[str]:
    """Yield, in words, the networks that a plan lets see private images before anything is noised."""
    if isinstance(plan.encoder, TimmEncoderSpec):
        yield f"the encoder {plan.encoder.model}"
    if isinstance(plan.latent, Autoencoder):
        yield "an autoencoder"
    if isinstance(plan.condition, TextCondition):
        yield "the choice of a text encoder"
    if plan.base is not None:
        # Many silos may have taught it; a line of a document holds so much.
        yield f"an expert to train on, {plan.base.words}"[:MAX_TEXT]


def waiting_path(site: Site) -> Path:
    """Where the worker notes the plan that waits for a person."""
    return site.private / "plan-waits.json"


def read_waiting(site: Site) -> WaitingPlan | None:
    """Read which plan waits for a person, None where none does."""
    path = waiting_path(site)
    if not path.exists():
        return None
    return WaitingPlan.parse(path.read_bytes(), subject=path.name, limit=_MAX_BYTES)


def may_begin(site: Site, policy: Policy, plan: Plan, plan_digest: str) -> bool:
    """Whether a plan needs no person, or a person accepted it; else it is noted as waiting."""
    networks = tuple(networks_of(plan))
    match policy.plans.accept:
        case "person":
            needs_person = True
        # A plan without networks computes only what this program contains, so that the policy alone may accept it.
        case "networks":
            needs_person = bool(networks)
        case "policy":
            needs_person = False
    # A person may have accepted the digest in advance, read out by the aggregator's operator.
    if not needs_person or is_accepted(site, plan_digest):
        waiting_path(site).unlink(missing_ok=True)
        return True
    waiting = WaitingPlan(plan_id=plan.plan_id, plan_digest=plan_digest, networks=networks)
    write_atomic(waiting_path(site), waiting.encode(), mode=0o600)
    return False


def is_accepted(site: Site, plan_digest: str) -> bool:
    """Whether a person accepted the plan with this digest."""
    path = _consent_path(site)
    if not path.exists():
        return False
    consent = PlanConsent.parse(path.read_bytes(), subject=path.name, limit=_MAX_BYTES)
    return consent.plan_digest == plan_digest


def record_acceptance(site: Site, plan_digest: str) -> WaitingPlan | None:
    """Record a person's acceptance of exactly the plan with this digest, and return it if it waits already.

    Raises:
        ApprovalError: another plan waits.
    """
    waiting = read_waiting(site)
    # Exactly the plan that a person read about: the aggregator may have signed another one meanwhile.
    if waiting and waiting.plan_digest != plan_digest:
        expected = f"the digest of the plan that waits, {waiting.plan_digest}"
        raise ApprovalError(
            "acceptance of a plan",
            expected=expected,
            got=ascii(plan_digest[:80]),
            remedy=(
                "Run `silo status SITE`: it shows the plan that waits, and the command that accepts it "
                "with its digest."
            ),
        )
    consent = PlanConsent(plan_digest=plan_digest)
    write_atomic(_consent_path(site), consent.encode(), mode=0o600)
    return waiting


def _consent_path(site: Site) -> Path:
    return site.private / "plan-consent.json"
