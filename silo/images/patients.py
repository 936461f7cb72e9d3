"""Patients under pseudonyms: keyed digests of their identifiers, and of those without the ways of spelling them."""

import hashlib
import hmac
import re
import unicodedata

MISSING = frozenset({"", "nan", "nat", "none", "null", "na", "n/a", "<na>"})  # as tables write them
_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_FRACTION = re.compile(r"(?<=\d)\.0+$")  # as a table of floating point writes whole numbers
_DIGEST_CHARACTERS = 32


def pseudonyms(identifier: str | None, key: bytes) -> tuple[str, str] | None:
    """Return the pseudonym of a patient, and one that identifiers of like spelling share; None of nobody.

    Blanks around an identifier do not count. Case, further blanks, leading zeros, ``.0`` at the end and Unicode's
    compatible characters make two patients whose second pseudonyms are equal.

    Args:
        identifier: as a file or a table names the patient.
        key: of this scan alone, never to leave.
    """
    exact = (identifier or "").strip()
    if exact.lower() in MISSING:
        return None
    loose = "".join(unicodedata.normalize("NFKC", exact).casefold().split())
    loose = _ZEROS.sub("", _FRACTION.sub("", loose))
    return keyed(b"patient ", exact, key), keyed(b"spelling ", loose, key)


def keyed(purpose: bytes, text: str, key: bytes) -> str:
    """Return a keyed digest of a text, 32 hexadecimal digits, for one purpose."""
    data = purpose + text.encode("utf-8", "surrogatepass")
    return hmac.new(key, data, hashlib.sha256).hexdigest()[:_DIGEST_CHARACTERS]
