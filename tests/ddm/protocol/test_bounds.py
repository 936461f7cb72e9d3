"""Every number, text and list of a document has an upper bound in its model, so that no sender chooses a size."""

import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Le, MaxLen
from pydantic import AwareDatetime, BaseModel, StringConstraints

from aggregator.planning.recipe import Recipe
from ddm.distillation.student import Student
from ddm.protocol.enrolment import Card, Invitation
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Receipt
from ddm.protocol.submission import Submission
from silo.worker.state import State

DOCUMENTS = (Plan, Submission, Manifest, Receipt, Invitation, Card, State, Student, Recipe)
LONGEST = 65536
# the standard library's: it tells the widest match of a pattern
PATTERNS: Any = import_module("re._parser")


def unbounded(model: type[BaseModel]) -> list[str]:
    """Name every field of a model, at any depth, that may be as large as its sender likes."""
    return sorted(set(_of_model(model, model.__name__, set())))


def _of_model(model: type[BaseModel], where: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        yield from _of_type(field.annotation, list(field.metadata), f"{where}.{name}", seen)


def _of_type(kind: Any, limits: list[Any], where: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin is Annotated:
        yield from _of_type(parts[0], [*_flat(parts[1:]), *limits], where, seen)
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _of_type(part, limits, where, seen)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from _of_model(kind, f"{where}({kind.__name__})", seen)
    elif kind is int or kind is float:
        if not _has(limits, "le", "lt"):
            yield where
    elif kind is str:
        if not (_has(limits, "max_length") or _widest(limits) <= LONGEST):
            yield where
    elif origin in (tuple, list, dict, Sequence, Mapping):
        fixed = origin is tuple and Ellipsis not in parts
        if not fixed and not _has(limits, "max_length"):
            yield where
        for part in parts:
            if part is not Ellipsis:
                yield from _of_type(part, [], f"{where}[]", seen)
    elif not (kind in (bool, datetime, AwareDatetime, type(None)) or origin is Literal):
        yield f"{where}: {kind}, which this test does not know"


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for annotation in metadata:
        yield from annotation.metadata if hasattr(annotation, "metadata") else (annotation,)
        yield annotation


def _has(limits: list[Any], *names: str) -> bool:
    return any(getattr(limit, name, None) is not None for limit in limits for name in names)


def _widest(limits: list[Any]) -> int:
    patterns = [limit.pattern for limit in limits if getattr(limit, "pattern", None)]
    assert all(text.startswith("^") and text.endswith("$") for text in patterns)
    return min((PATTERNS.parse(text).getwidth()[1] for text in patterns), default=LONGEST + 1)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.__name__)
def test_every_field_of_a_document_has_an_upper_bound(document: type[BaseModel]) -> None:
    assert unbounded(document) == []


class Part(BaseModel):
    """A part with one bounded and one free field."""

    bounded: tuple[Annotated[int, Le(3)], ...]
    free: Annotated[tuple[float, ...], MaxLen(2)]


class Free(BaseModel):
    """Fields as large as their sender likes, beside the same fields with bounds."""

    number: int
    maybe: float | None
    text: str
    pattern: Annotated[str, StringConstraints(pattern="^a+$")]
    table: dict[str, Part]
    short: Annotated[str, StringConstraints(pattern="^a{3}$")]
    flag: bool
    kind: Literal["a", "b"]


def test_control_fields_without_a_bound_are_found() -> None:
    assert unbounded(Free) == sorted(
        [
            "Free.maybe",
            "Free.number",
            "Free.pattern",
            "Free.table",
            "Free.table[]",
            "Free.table[](Part).bounded",
            "Free.table[](Part).free[]",
            "Free.text",
        ]
    )
