"""A signed document that travelled by mail: what the mail program changed is named, and the fresh copy opens."""

import codecs
from collections.abc import Callable

import pytest

from ddm.errors import DocumentError
from ddm.protocol.base import REWRITTEN_FILE_REMEDY
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda data: codecs.BOM_UTF8 + data, "a byte order mark before the text"),
        (lambda data: data.decode().encode("utf-16"), "text in UTF-16"),
        (lambda data: data[:-1] + b"\r\n}", "line ends of Windows (CR LF)"),
        (lambda data: data[:60] + b"\r\n" + data[60:], "a line break inside a text"),
        (lambda data: data[:60] + b"\n" + data[60:], "a line break inside a text"),
        (lambda data: data + b"\n", "another encoding of the same values"),
    ],
)
def test_sealed_document_that_was_rewritten_says_how(
    change: Callable[[bytes], bytes], got: str
) -> None:
    key = SigningKey.generate()
    sealed = seal(b'{"a":1,"b":2}', "card", key)
    assert open_sealed(sealed, "card", key.public, 4096)[0] == b'{"a":1,"b":2}'
    with pytest.raises(DocumentError) as refused:
        open_sealed(change(sealed), "card", key.public, 4096)
    assert (refused.value.got, refused.value.remedy) == (got, REWRITTEN_FILE_REMEDY)
