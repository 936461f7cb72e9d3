"""Codes of six words: each stands for a digest, so that two people can compare it on the telephone.

An invitation, a root and a card have codes. Anybody who replaces an invitation or a card on its way can try keys until
the code of the forgery is the right one. So the words carry 66 bits, and scrypt makes every trial cost time and memory
(docs/adr/0080-a-code-of-six-words.md).
"""

import hashlib
import re
from enum import StrEnum
from functools import cache
from pathlib import Path

from ddm.errors import SetupError
from ddm.trust.keys import parse_fingerprint

NUM_WORDS = 6
_BITS_PER_WORD = 11
_WORDS_FILE = Path(__file__).with_name("comparison_words.txt")
# 32 MiB and about 0.1 s for each trial.
_SCRYPT_N = 2**15
_SCRYPT_R = 8
_SCRYPT_P = 1
_SCRYPT_MAX_BYTES = 64 * 1024**2


class CodeSubject(StrEnum):
    """What a code stands for; codes of different subjects have nothing in common.

    Attributes:
        INVITATION: an invitation, whose code the operator of a silo types.
        ROOT: a federation's first root, whose code readers of releases compare.
        CARD: a silo's card, whose code the operator of the aggregator types.
    """

    INVITATION = "invitation"
    ROOT = "root"
    CARD = "card"


@cache
def comparison_words() -> tuple[str, ...]:
    """Return the 2,048 words of which codes consist."""
    lines = _WORDS_FILE.read_text("ascii").splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


def comparison_code(digest: str, subject: CodeSubject) -> str:
    """Return the six words that stand for a sha256 digest.

    Args:
        digest: 64 hex digits.
        subject: what was hashed.
    """
    num_bits = NUM_WORDS * _BITS_PER_WORD
    num_bytes = (num_bits + 7) // 8
    stretched = hashlib.scrypt(
        bytes.fromhex(digest),
        salt=f"archipelago/code/{subject}".encode(),
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=_SCRYPT_P,
        maxmem=_SCRYPT_MAX_BYTES,
        dklen=num_bytes,
    )
    number = int.from_bytes(stretched, "big") >> (8 * num_bytes - num_bits)
    words = []
    for position in reversed(range(NUM_WORDS)):
        index = (number >> (position * _BITS_PER_WORD)) % 2**_BITS_PER_WORD
        words.append(comparison_words()[index])
    return " ".join(words)


def parse_code(text: str) -> str:
    """Parse a code as people type it, in either case, with blanks or hyphens; or the whole digest in its place.

    Returns:
        Six words with a blank between them, or 64 hex digits.

    Raises:
        SetupError: neither; it names the first word that is not in the list.
    """
    words = re.split(r"[\s-]+", text.strip().lower())
    if re.fullmatch(r"[0-9a-f:]+", "".join(words)):
        return parse_fingerprint(text)
    for position, word in enumerate(words, start=1):
        if word not in comparison_words():
            raise SetupError(
                f"code, word {position}",
                expected="a word of the list of codes",
                got=ascii(word[:40]),
                remedy="Ask for this word again, letter by letter, and type all six words.",
            )
    if len(words) != NUM_WORDS:
        raise SetupError(
            "code",
            expected=f"{NUM_WORDS} words",
            got=f"{len(words)}",
            remedy=f"Type all {NUM_WORDS} words, with blanks between them.",
        )
    return " ".join(words)


def is_code_of(code: str, digest: str, subject: CodeSubject) -> bool:
    """Return whether a code, as `parse_code` returns it, stands for this digest, or is the digest itself."""
    return code in (digest, comparison_code(digest, subject))
