"""docs/reference/recipe.md: every table and field of the recipe, from the models that read it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aggregator.planning.recipe import Recipe
from ddm.islands.recipe import OwnerRecipe
from ddm.protocol.architecture import ExpertArchitecture
from ddm.protocol.base import TEXT_PATTERN
from tools.reference.docstring import Docstring, parse

HEAD = """\
# The recipe of a plan

`make docs` writes this page from the code. The recipe is what an operator writes for `aggregator plan`: one TOML file
of at most 16 KiB. Fields that are not on this page are refused, and so are values out of bounds. There are complete
recipes [for each case](../how-to/run-an-aggregator.md#plan); [Documents](documents.md#plan) describes the signed plan.
`ddm split` reads the same file; it does not need `statistics`, `audit` and `limits`, and has a table `[owner]`. If a
table has several kinds, its field `kind` names one, and each kind has its own fields. Paths are relative to the folder
in which the command is run.
"""
ROW = "| `{name}` | {type} | {default} | {bounds} | {meaning} |"
SIZE_ROW = "| `size` | text | none | {names} | A published size, in place of the numbers that it stands for. |"
TABLE = "| field | type | default | bounds | meaning |\n| --- | --- | --- | --- | --- |"
NAMES = {int: "whole number", float: "number", str: "text", bool: "boolean"}
UNBOUNDED = 2**53 - 1  # what a document can hold, not a limit that anybody meets


@dataclass(frozen=True)
class Table:
    """One table of the TOML.

    Attributes:
        name: its dotted name; empty for the top level.
        model: what reads it.
        remark: when it is needed.
        listed: whether it is an array of tables.
    """

    name: str
    model: type[BaseModel]
    remark: str = ""
    listed: bool = False


def recipe_page() -> str:
    """Return the page."""
    every = [
        *tables(Table("", Recipe)),
        Table("owner", OwnerRecipe, "Only for `ddm split`; optional."),
    ]
    return "\n".join([HEAD, *(line for table in every for line in section(table))])


def tables(table: Table) -> Iterator[Table]:
    """Yield a table and all tables below it, in the order of their fields."""
    yield table
    for name, info in table.model.model_fields.items():
        models = list(models_in(info.annotation))
        for model in models:
            remark = "Required." if info.is_required() else "Optional."
            if isinstance(info.default, BaseModel) and len(models) > 1:
                remark = (
                    "Used if the table is left out."
                    if isinstance(info.default, model)
                    else "Optional."
                )
            elif len(models) > 1 and info.is_required():
                remark = "Required, in one of its kinds."
            listed = get_origin(info.annotation) is tuple
            yield from tables(Table(f"{table.name}.{name}".lstrip("."), model, remark, listed))


def section(table: Table) -> Iterator[str]:
    """Yield the lines of one table's section."""
    kind = table.model.model_fields.get("kind")
    brackets = f"[[{table.name}]]" if table.listed else f"[{table.name}]"
    title = f"`{brackets}`" + (f', kind "{get_args(kind.annotation)[0]}"' if kind else "")
    text = docstring(table.model).text.partition("\n\n")[0]
    yield f"## {title}\n" if table.name else "## Top level\n"
    yield f"{text} {table.remark}".rstrip() + "\n"
    rows = [
        row(table, name, info)
        for name, info in table.model.model_fields.items()
        if is_leaf(name, info)
    ]
    if issubclass(table.model, ExpertArchitecture) and table.model.size_names:
        rows.append(SIZE_ROW.format(names=table.model.size_names))
    if rows:
        yield TABLE
        yield from rows
        yield ""


def row(table: Table, name: str, info: FieldInfo) -> str:
    """Return a field's line.

    Raises:
        KeyError: no model says in one sentence what the field means.
    """
    says: dict[str, str] = {}
    for model in reversed(table.model.__mro__):
        says |= docstring(model).entries("Attributes")
    if name not in says:
        raise KeyError(f"{table.model.__name__}.{name} has no line under Attributes")
    meaning = says[name][0].upper() + says[name][1:]
    word, bounds = described(info.annotation, info.metadata)
    line = {
        "name": name,
        "type": word,
        "default": default_of(info),
        "bounds": bounds,
        "meaning": meaning,
    }
    return ROW.format(**{column: text.replace("|", "\\|") for column, text in line.items()})


def is_leaf(name: str, info: FieldInfo) -> bool:
    """Whether a field is a row: neither a table of its own, nor the kind in the heading, nor always null."""
    return (
        name != "kind" and info.annotation is not NoneType and not any(models_in(info.annotation))
    )


def docstring(model: type) -> Docstring:
    """Return a model's own docstring, taken apart."""
    return parse(model.__doc__ if "__doc__" in vars(model) else None)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def default_of(info: FieldInfo) -> str:
    """Return a default as TOML writes it."""
    if info.is_required():
        return "required"
    if info.default is None or info.default in ((), {}):
        return "none"
    return f"`{json.dumps(info.default)}`"


def described(annotation: Any, metadata: list[Any]) -> tuple[str, str]:
    """Return the word for a type, and its bounds."""
    arguments = [argument for argument in get_args(annotation) if argument is not NoneType]
    match get_origin(annotation):
        case origin if origin is Annotated:
            inner, *more = get_args(annotation)
            return described(inner, [*flat(more), *metadata])
        case origin if origin is Literal:
            return NAMES[type(arguments[0])], ", ".join(
                f"`{json.dumps(choice)}`" for choice in arguments
            )
        case origin if origin in (Union, UnionType):
            (inner,) = arguments
            return described(inner, metadata)
        case origin if origin is tuple:
            word, bounds = described(arguments[0], [])
            many = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
            return f"list of {many}{word}s", "; ".join(
                filter(None, [length(metadata), bounds and f"each {bounds}"])
            )
        case origin if origin is dict:
            return "table", length(metadata)
        case _:
            return NAMES[annotation], limits(annotation, flat(metadata))


def flat(metadata: list[Any]) -> list[Any]:
    """Return constraints, with those inside a pydantic Field taken out of it."""
    return [
        each
        for item in metadata
        for each in (flat(item.metadata) if isinstance(item, FieldInfo) else [item])
    ]


def bound(metadata: list[Any], name: str) -> Any:
    """Return one constraint's value, None where there is none."""
    return next(
        (value for item in metadata if (value := getattr(item, name, None)) is not None), None
    )


def length(metadata: list[Any]) -> str:
    """Say how many entries a list may have."""
    least, most = bound(metadata, "min_length"), bound(metadata, "max_length")
    return f"{least or 0} to {most} entries" if most else ""


def limits(annotation: type, metadata: list[Any]) -> str:
    """Say which numbers, or which texts, are accepted."""
    above, least = bound(metadata, "gt"), bound(metadata, "ge")
    below, most = bound(metadata, "lt"), bound(metadata, "le")
    if annotation is str:
        pattern = bound(metadata, "pattern")
        most = bound(metadata, "max_length")
        bounds = []
        if pattern == TEXT_PATTERN:
            bounds.append("visible characters on one line")
        elif pattern:
            bounds.append(f"matches `{pattern}`")
        if most:
            bounds.append(f"at most {most} characters")
        return "; ".join(bounds)
    if annotation is int:
        least = above + 1 if above is not None else least
        most = below - 1 if below is not None else most
        return f"at least {least}" if most in (None, UNBOUNDED) else f"{least} to {most:,}"
    parts = (("above", above), ("at least", least), ("below", below), ("at most", most))
    return ", ".join(f"{word} {value:g}" for word, value in parts if value is not None)
