"""Texts of documents: no sender moves a cursor, turns the direction of writing or hides characters in a signed text."""

import importlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from aggregator.config import FederationSettings
from ddm.errors import DocumentError, SetupError
from ddm.islands.recipe import OwnerRecipe
from ddm.protocol.base import Document, ShortText, require_text
from ddm.system.escape import escape_control
from ddm.trust.ceremony import SigningRequest
from ddm.trust.log.entries import FederationOpened, KeyChanged
from tests.support.case import case

ROOT = Path(__file__).parents[3]
DEFINES_DOCUMENT = re.compile(r"^class \w+\(.*Document\b", re.MULTILINE)
# Only the program that wrote them reads them.
OWN_STATE = {
    "DecisionRecord",
    "ExpertExamination",
    "FederationStatus",
    "Launch",
    "LogRecord",
    "PendingChange",
    "ProcessFailure",
    "QuarantineRecord",
    "RemovedRoles",
    "Sites",
    "Split",
    "TrainingJob",
    "_VersionRecord",
}
# Read by parsers of their own: a certificate (PEM), other signed documents in JSON, and the path of a file here.
PARSED_ELSEWHERE = {
    "Invitation.ca_certificate",
    "Invitation.root",
    "SigningRequest.payload",
    "SigningRequest.before",
    "SigningRequest.root",
    "RemovalRecord.card",
    "FederationSettings.passphrase_file",
    "_Envelope.payload",
}
HOSTILE = {
    "escape sequence": "\x1b[2J",
    "line break": "two\nlines",
    "carriage return": "over\rwritten",
    "tab": "a\tb",
    "null": "a\x00b",
    "delete": "a\x7fb",
    "C1 control": "a\x9bb",
    "override to the left": "a\u202eb",
    "isolate": "a\u2066b",
    "mark to the left": "a\u200fb",
    "Arabic letter mark": "a\u061cb",
    "zero width": "a\u200bb",
    "soft hyphen": "a\u00adb",
    "line separator": "a\u2028b",
    "byte order mark": "a\ufeffb",
}


def texts_of(model: type[BaseModel], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every text of a document, at any depth, with its type."""
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        for limit in field.metadata:
            annotation = Annotated[annotation, limit]
        yield from _texts_in(annotation, f"{where or model.__name__}.{name}", [])


def _texts_in(kind: Any, where: str, limits: list[Any]) -> Iterator[tuple[str, Any]]:
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin is Annotated:
        yield from _texts_in(parts[0], where, [*parts[1:], *limits])
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _texts_in(part, where, limits)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from texts_of(kind, f"{where}({kind.__name__})")
    elif kind is str:
        annotation: Any = str
        for limit in limits:
            annotation = Annotated[annotation, limit]
        yield where, annotation
    elif origin in (tuple, list, dict, Sequence, Mapping):
        for part in parts:
            if part is not Ellipsis:
                yield from _texts_in(part, f"{where}[]", [])
    else:
        assert origin is Literal or not issubclass(kind, str), where


def subclasses(kind: type[Document]) -> Iterator[type[Document]]:
    """Yield all documents below a class that were imported."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def received_documents() -> list[type[BaseModel]]:
    """Return every document that another machine or person may have written."""
    for package in ("ddm", "silo", "aggregator"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if DEFINES_DOCUMENT.search(path.read_text("utf-8")):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    documents = {document.__name__: document for document in subclasses(Document)}
    return [
        *(document for name, document in sorted(documents.items()) if name not in OWN_STATE),
        *(FederationOpened, KeyChanged, OwnerRecipe, FederationSettings),
    ]


DOCUMENTS = received_documents()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.__name__)
def test_no_text_of_a_document_takes_characters_that_are_not_shown(
    document: type[BaseModel],
) -> None:
    for where, annotation in texts_of(document):
        if where in PARSED_ELSEWHERE:
            continue
        adapter = TypeAdapter(annotation)
        for what, hostile in HOSTILE.items():
            with case(where=where, what=what), pytest.raises(ValidationError):
                adapter.validate_python(hostile)


def test_texts_of_all_documents_are_looked_at() -> None:
    seen = {where for document in DOCUMENTS for where, _ in texts_of(document)}
    assert {"Manifest.licence", "Receipt.verdict(WithdrawnVerdict).reason"} <= seen
    names = {document.__name__ for document in subclasses(Document)}
    # A name here that is no document's would let a new one of that name go unseen.
    assert names >= OWN_STATE


def test_ordinary_text_in_any_language_is_taken() -> None:
    adapter = TypeAdapter(ShortText)
    for text in (
        "",
        "CC-BY-4.0",
        "Klinikum S\u00fcd, 2. Stock",
        "\u0645\u0633\u062a\u0634\u0641\u0649",
        "\u75c5\u9662",
        "\u05d1\u05d9\u05ea \u05d7\u05d5\u05dc\u05d9\u05dd",
    ):
        assert adapter.validate_python(text) == text


def test_refusal_says_what_is_wrong_without_the_text() -> None:
    data = b'{"format": "archipelago/signing-request/1", "purpose": "a\\u001b[2Jsecret"}'
    with pytest.raises(DocumentError) as refused:
        SigningRequest.parse(data, subject="request")
    assert "secret" not in str(refused.value) and "\\x" not in str(refused.value)


def test_text_that_an_operator_types_is_refused_when_it_holds_what_is_not_shown() -> None:
    assert require_text(" plain ", "--reason") == "plain"
    for text in [*HOSTILE.values(), "", " ", None, "a" * 401]:
        with case(text=text), pytest.raises(SetupError):
            require_text(text, "--reason")


def test_what_the_programs_escape_can_be_signed() -> None:
    adapter = TypeAdapter(ShortText)
    for hostile in (*HOSTILE.values(), "half \ud800"):
        adapter.validate_python(escape_control(hostile, one_line=True))
