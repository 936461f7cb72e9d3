"""Makes the invitation with which a silo reaches this federation."""

from aggregator.config import Federation
from ddm.protocol.base import sha256_hex
from ddm.protocol.enrolment import Invitation
from ddm.trust.rules import trusted_log_keys


def make_invitation(federation: Federation, root: bytes) -> Invitation:
    """Return the invitation: name, address, certificate authority and first root of the federation."""
    settings = federation.settings()
    return Invitation(
        federation=settings.name,
        address=f"{settings.host}:{settings.port}",
        ca_certificate=(federation.path / "tls" / "ca.pem").read_text("ascii"),
        root=root.decode("utf-8"),
        root_digest=sha256_hex(root),
        log_key=trusted_log_keys({"1.root.json": root}, root, {})[-1],
    )
