"""Patients under pseudonyms: keyed digests of their identifiers, and of those without the ways of spelling them."""

import hashlib
import hmac
import re
import unicodedata

MISSING = frozenset({"", "nan", "nat", "none", "null", "na", "n/a", "<na>"})  # as tables write them
_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_FRACTION = re.compile(r"(?<=\d)\.0+$")  # as a table of floating point writes whole numbers
DIGEST_CHARACTERS = 32


def canonical(identifier: str) -> str:
    """Return a patient's identifier without what does not tell patients apart: case, blanks, punctuation.

    Unicode's compatible characters count as one, and ``.0`` at the end of a number is dropped. Two patients that this
    makes one are protected together, which is never less. What consists of nothing else stays as it is.
    """
    text = identifier.strip()
    plain = _FRACTION.sub("", unicodedata.normalize("NFKC", text).casefold())
    return "".join(each for each in plain if each.isalnum()) or text


def pseudonyms(identifier: str | None, key: bytes) -> tuple[str, str] | None:
    """Return the pseudonym of a patient, and one that identifiers of like spelling share; None of nobody.

    Spellings that `canonical` makes one are one patient. Leading zeros make two, whose second pseudonyms are equal.

    Args:
        identifier: as a file or a table names the patient.
        key: of this scan alone, never to leave.
    """
    text = (identifier or "").strip()
    if text.lower() in MISSING:
        return None
    exact = canonical(text)
    loose = _ZEROS.sub("", exact)
    return keyed(b"patient ", exact, key), keyed(b"spelling ", loose, key)


def order_key(salt: bytes) -> bytes:
    """Return the key of `order_of`, from the secret beside the ledger: it stays when scans are made anew elsewhere."""
    return hmac.digest(salt, b"order of patients", "sha256")


def order_of(identifier: str | None, key: bytes) -> str | None:
    """Return a keyed digest of a patient's identifier that puts patients into a secret order; None of nobody."""
    text = (identifier or "").strip()
    return None if text.lower() in MISSING else keyed(b"order ", canonical(text), key)


def keyed(purpose: bytes, text: str, key: bytes) -> str:
    """Return a keyed digest of a text, 32 hexadecimal digits, for one purpose."""
    data = purpose + text.encode("utf-8", "surrogatepass")
    return hmac.new(key, data, hashlib.sha256).hexdigest()[:DIGEST_CHARACTERS]
