"""Makes the invitation, which tells silos how to reach this federation and from which root to verify it.

Nobody signs an invitation. Its code covers all of it, so that every change gives it another code
(docs/adr/0080-a-code-of-six-words.md).
"""

from aggregator.config import SETTINGS_HEADING, Federation
from ddm.io.changes import Change
from ddm.io.files import read_bounded, require_file, write_atomic
from ddm.io.settings import save_settings
from ddm.protocol.address import split_address
from ddm.protocol.base import sha256_hex
from ddm.protocol.enrolment import MAX_INVITATION_BYTES, Invitation
from ddm.trust.rules import trusted_log_keys

INVITATION_NAME = "invitation.json"


def read_own_invitation(federation: Federation) -> Invitation:
    """Read the invitation that this federation gives to silos.

    Raises:
        MissingFileError: the federation waits for signatures of its holders, or the file is gone.
    """
    path = require_file(
        federation.path / INVITATION_NAME,
        "this federation's invitation",
        "Restore it from backup; if the root still waits for signatures, finish it: `aggregator complete FED`.",
    )
    return Invitation.parse(
        read_bounded(path, MAX_INVITATION_BYTES),
        subject=INVITATION_NAME,
        limit=MAX_INVITATION_BYTES,
    )


def make_invitation(federation: Federation, root: bytes, address: str) -> Invitation:
    """Return what a silo needs to reach this federation: name, licence, address, certificate authority and first root.

    Args:
        federation: the operator's folder.
        root: its first root.
        address: HOST:PORT at which silos reach the aggregator.
    """
    settings = federation.settings()
    return Invitation(
        federation=settings.name,
        licence=settings.licence,
        address=address,
        ca_certificate=(federation.path / "tls" / "ca.pem").read_text("ascii"),
        root=root.decode("utf-8"),
        root_digest=sha256_hex(root),
        # From the signed root itself, so that invitation and root cannot name two logs.
        log_key=trusted_log_keys({"1.root.json": root}, root, {})[-1],
    )


def renew_invitation(federation: Federation, address: str | None = None) -> bool:
    """Write the invitation again, if the licence, the authority or the address has changed since it was written.

    A new address comes into `federation.toml` too, for the next `aggregator run`. A host or a port there that was not
    the old address stays: the operator chose to listen elsewhere than where silos connect.

    Args:
        federation: the operator's folder.
        address: HOST:PORT at which silos reach the aggregator from now on; None keeps the address.

    Returns:
        Whether the invitation has changed, and with it its code.

    Raises:
        MissingFileError: see `read_own_invitation`.
        BusyError: another process signs, or a change waits for signatures.
    """
    with federation.signing_lock():
        invitation = read_own_invitation(federation)
        root = (federation.tuf / "1.root.json").read_bytes()
        renewed = make_invitation(federation, root, address or invitation.address)
        if renewed == invitation:
            return False
        change = Change.begin(federation.path)
        write_atomic(change.put(INVITATION_NAME), renewed.encode())
        settings = federation.settings()
        old_host, old_port = split_address(invitation.address)
        new_host, new_port = split_address(renewed.address)
        if settings.host == old_host:
            settings = settings.model_copy(update={"host": new_host})
        if settings.port == old_port:
            settings = settings.model_copy(update={"port": new_port})
        if settings != federation.settings():
            save_settings(settings, change.put("federation.toml"), SETTINGS_HEADING)
        change.commit()
    return True
