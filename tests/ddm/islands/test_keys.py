"""The islands' keys: by RFC 5869 from one key, and another one for each island and plan."""

import hmac

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ddm.islands.keys import island_key
from ddm.trust.keys import SigningKey

PLAN = "digits-0123abcd"
OTHER = "digits-4567abcd"


def test_key_of_an_island_is_that_of_rfc_5869_and_no_other_islands() -> None:
    secret = bytes(range(32))
    source = SigningKey(Ed25519PrivateKey.from_private_bytes(secret))
    extracted = hmac.digest(bytes(32), secret, "sha256")
    wanted = hmac.digest(extracted, f"archipelago/{PLAN}.island0".encode() + b"\x01", "sha256")
    public = Ed25519PrivateKey.from_private_bytes(wanted).public_key().public_bytes_raw()
    assert island_key(source, PLAN, "island0").public.raw == public
    derived = {
        island_key(source, plan, f"island{k}").public for plan in (PLAN, OTHER) for k in range(3)
    }
    assert len(derived | {source.public}) == 7
