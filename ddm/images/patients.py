"""Patients under pseudonyms: keyed digests of their identifiers, and of those without the ways of spelling them."""

import hashlib
import hmac
import re
import unicodedata
from typing import Literal

MISSING = frozenset({"", "nan", "-nan", "nat", "none", "null", "na", "n/a", "<na>", "#n/a", "#na"})
"""How tables, Excel and pandas write that there is nothing; without case."""
_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_FRACTION = re.compile(r"(?<=\d)\.0+$")  # as a table of floating point writes whole numbers
_TRANSCRIBED = str.maketrans(
    {
        "\u00e4": "ae",
        "\u00f6": "oe",
        "\u00fc": "ue",
        "\u00e5": "aa",
        "\u00f8": "oe",
        "\u00e6": "ae",
        "\u0153": "oe",
    }
)
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_UMLAUT = re.compile("(?<=[aou])e")
DIGEST_CHARACTERS = 32

PatientRule = Literal["spelling", "digits"]
"""Which characters of an identifier distinguish patients: letters and digits, or only digits, without leading zeros."""


def visible_text(text: str) -> str:
    """Return a text without blanks around it and without invisible characters, such as zero-width spaces."""
    if not text.isascii():
        text = _INVISIBLE.sub("", text)
    return text.strip()


def is_missing(text: str) -> bool:
    """Whether a text without blanks around it says that there is nothing."""
    return text.casefold() in MISSING


def canonical(identifier: str, rule: PatientRule = "spelling") -> str:
    """Return a patient's identifier without what does not tell patients apart: case, blanks, punctuation.

    Unicode's compatible characters count as one, and ``.0`` at the end of a number is dropped. Two patients that this
    makes one are protected together, which is never less. What consists of nothing else stays as it is.

    Args:
        identifier: as a file or a table names the patient.
        rule: with `digits`, letters do not tell patients apart either, nor do leading zeros; an identifier without
            digits goes by its spelling.
    """
    text = identifier.strip()
    plain = _FRACTION.sub("", unicodedata.normalize("NFKC", text).casefold())
    if rule == "digits":
        digits = "".join(character for character in plain if character.isdecimal())
        if digits:
            if digits.isascii():
                return str(int(digits))
            return digits
    return "".join(character for character in plain if character.isalnum()) or text


def similar(identifier: str, rule: PatientRule = "spelling") -> str:
    """Return what identifiers share that a person may have spelled in two ways, though they count as two patients.

    Leading zeros, and umlauts and accents: `M\u00dcLLER`, `Mueller` and `Muller` are similar, and so are 17 and 0017.
    """
    plain = canonical(identifier, rule).translate(_TRANSCRIBED)
    decomposed = unicodedata.normalize("NFD", plain)
    letters = "".join(character for character in decomposed if not unicodedata.combining(character))
    # The e of ae, oe and ue goes too, so that both ways to write an umlaut become one.
    without_umlauts = _UMLAUT.sub("", letters)
    return _ZEROS.sub("", without_umlauts)


def pseudonyms(
    identifier: str | None,
    key: bytes,
    rule: PatientRule = "spelling",
) -> tuple[str, str] | None:
    """Return the pseudonym of a patient, and one that identifiers of like spelling share; None without an identifier.

    Spellings that `canonical` makes one are one patient. Those that are `similar` are several, whose second pseudonyms
    are equal.

    Args:
        identifier: as a file or a table names the patient.
        key: the key of this scan alone, which never leaves the site.
        rule: which characters of an identifier distinguish patients.
    """
    text = (identifier or "").strip()
    if is_missing(text):
        return None
    return keyed(b"patient ", canonical(text, rule), key), keyed(
        b"spelling ",
        similar(text, rule),
        key,
    )


def order_key(salt: bytes) -> bytes:
    """Return the key of `order_of`, from the secret beside the ledger: it stays when scans are made again elsewhere."""
    return hmac.digest(salt, b"order of patients", "sha256")


def order_of(
    identifier: str | None,
    key: bytes,
    rule: PatientRule = "spelling",
) -> str | None:
    """Return a keyed digest of a patient's identifier that puts patients into a secret order; None without one."""
    text = (identifier or "").strip()
    if is_missing(text):
        return None
    return keyed(b"order ", canonical(text, rule), key)


def keyed(
    purpose: bytes,
    text: str,
    key: bytes,
) -> str:
    """Return a keyed digest of a text, 32 hexadecimal digits, for one purpose."""
    data = purpose + text.encode("utf-8", "surrogatepass")
    return hmac.new(key, data, hashlib.sha256).hexdigest()[:DIGEST_CHARACTERS]
