"""A silo's change of its signing key: sealed by the new key inside and by the old key outside; pure functions.

The new key's seal proves that the silo holds it: otherwise a silo could announce somebody else's key as its own. The
old key's seal proves that the silo wants the change: otherwise the aggregator could announce a key of its own. Anybody
who remembers the old key accepts the new one without asking anybody. A list of such rotations is a chain, which leads
from a remembered key over several to the present one.
"""

from collections.abc import Sequence
from itertools import pairwise

from ddm.errors import DocumentError, ReplayError, SignatureError
from ddm.protocol.enrolment import MAX_ROTATION_BYTES, KeyRotation
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import PublicKey, SigningKey

_OLD_KIND = "key-rotation"
_NEW_KIND = "key-rotation-by-new-key"


def seal_rotation(rotation: KeyRotation, old: SigningKey, new: SigningKey) -> bytes:
    """Seal a rotation with both keys.

    Raises:
        SignatureError: a key is not the one that the rotation names.
    """
    _check_named(rotation, old.public, new.public)
    sealed_by_new = seal(rotation.encode(), _NEW_KIND, new)
    return seal(sealed_by_new, _OLD_KIND, old)


def open_rotation(data: bytes) -> KeyRotation:
    """Open a sealed rotation.

    Raises:
        DocumentError: too large, malformed, or of another kind.
        SignatureError: not sealed by both keys that it names.
    """
    sealed_by_new, old = open_sealed(data, _OLD_KIND, None, MAX_ROTATION_BYTES)
    payload, new = open_sealed(sealed_by_new, _NEW_KIND, None, MAX_ROTATION_BYTES)
    rotation = KeyRotation.parse(payload, subject="key rotation", limit=MAX_ROTATION_BYTES)
    # The envelopes were opened with their own keys; these must be the ones that the rotation is about.
    _check_named(rotation, old, new)
    return rotation


def open_chain(sealed: Sequence[str], *, silo_id: str, root_digest: str) -> tuple[KeyRotation, ...]:
    """Open the rotations of one silo, each of which begins with the key that the one before led to.

    Args:
        sealed: in order; the first need not be the silo's first.
        silo_id: whose they must be.
        root_digest: the federation that they must be for.

    Raises:
        DocumentError: see `open_rotation`; or the rotations do not follow each other.
        SignatureError: see `open_rotation`.
        ReplayError: a rotation of another silo.
        FederationError: a rotation in another federation.
    """
    chain = tuple(open_rotation(text.encode()) for text in sealed)
    for rotation in chain:
        # A silo may use one key in two federations; a rotation in one of them must not count in the other.
        rotation.check_federation(root_digest, f"key rotation of {silo_id}")
        if rotation.silo_id != silo_id:
            raise ReplayError(
                f"key rotation of {silo_id}",
                expected=f"a rotation of silo {silo_id}",
                got=f"one of silo {rotation.silo_id}",
            )
    for before, after in pairwise(chain):
        if (after.number, after.old_key) != (before.number + 1, before.new_key):
            got = "another number"
            if after.old_key != before.new_key:
                got = f"rotation {after.number}, from another key"
            raise DocumentError(
                f"key rotations of {silo_id}",
                expected=f"rotation {before.number + 1}, "
                f"from the key that rotation {before.number} led to",
                got=got,
            )
    return chain


def _check_named(rotation: KeyRotation, old: PublicKey, new: PublicKey) -> None:
    if (str(old), str(new)) != (rotation.old_key, rotation.new_key) or old == new:
        raise SignatureError(
            f"key rotation of {rotation.silo_id}",
            expected="seals by the two different keys that it names",
            got="a seal by another key",
        )
