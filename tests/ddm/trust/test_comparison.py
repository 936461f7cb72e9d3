"""The code of six words: what it stands for, and how people may type it."""

import hashlib

import pytest

from ddm.errors import SetupError
from ddm.trust.comparison import (
    CodeSubject,
    comparison_code,
    comparison_words,
    is_code_of,
    parse_code,
)
from tests.support.errors import has_subject

DIGEST = hashlib.sha256(b"a root of trust").hexdigest()
# Of english.txt as https://github.com/bitcoin/bips/tree/master/bip-0039 has it.
PUBLISHED_LIST = "2f5eed53a4727b4bf8880d8f3f199efc90e58503646d9ff8eff3a2ed3b24dbda"


def test_words_are_the_published_list_of_bip_39() -> None:
    text = "".join(f"{word}\n" for word in comparison_words())
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED_LIST


def test_code_of_a_digest_is_the_first_66_bits_of_its_scrypt_in_words() -> None:
    words = comparison_code(DIGEST, CodeSubject.ROOT).split()
    bits = "".join(f"{comparison_words().index(word):011b}" for word in words)
    stretched = hashlib.scrypt(
        hashlib.sha256(b"a root of trust").digest(),
        salt=b"archipelago/code/root",
        n=32768,
        r=8,
        p=1,
        maxmem=2**26,
        dklen=32,
    )
    assert bits == f"{int.from_bytes(stretched, 'big'):0256b}"[:66]


def test_code_changes_with_the_digest_and_with_what_it_is_of() -> None:
    other_digest = hashlib.sha256(b"another root").hexdigest()
    codes = {
        comparison_code(digest, subject)
        for digest in (DIGEST, other_digest)
        for subject in CodeSubject
    }
    assert len(codes) == 2 * len(CodeSubject)


def test_code_is_taken_in_capitals_and_with_hyphens_and_the_digest_in_its_place() -> None:
    code = comparison_code(DIGEST, CodeSubject.CARD)
    for typed in (code, f"  {code.upper()} ", code.replace(" ", "-"), code.replace(" ", "\n")):
        assert parse_code(typed) == code
    assert is_code_of(parse_code(code), DIGEST, CodeSubject.CARD)
    assert is_code_of(parse_code(f"{DIGEST[:32]} {DIGEST[32:].upper()}"), DIGEST, CodeSubject.CARD)


def test_code_of_another_subject_or_digest_is_not_this_one() -> None:
    other_digest = hashlib.sha256(b"another root").hexdigest()
    assert not is_code_of(comparison_code(DIGEST, CodeSubject.ROOT), DIGEST, CodeSubject.CARD)
    assert not is_code_of(comparison_code(other_digest, CodeSubject.ROOT), DIGEST, CodeSubject.ROOT)
    assert not is_code_of(other_digest, DIGEST, CodeSubject.ROOT)


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("", "code, word 1"),
        ("abandon ability able about above abswnt", "code, word 6"),
        ("abandon ability able about above", "code"),
        ("abandon " * 7, "code"),
        (DIGEST[:63], "fingerprint"),
        ("face", "fingerprint"),
    ],
)
def test_text_that_is_no_code_is_refused_and_names_the_word(text: str, subject: str) -> None:
    with pytest.raises(SetupError, check=has_subject(subject)):
        parse_code(text)
