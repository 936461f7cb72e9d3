"""The documentation against the code: links resolve; every flag and every field has its line, and none is invented."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import typer
from pydantic import BaseModel

import aggregator.cli
import ddm
import ddm.cli.main
import silo.cli
from ddm.protocol.enrolment import Card, Invitation
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Receipt
from ddm.protocol.submission import Submission
from tools import reference

ROOT = Path(__file__).parent.parent
FOLDERS = (".github", "docs", "examples", "ddm", "silo", "aggregator", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
DOCUMENTS = ROOT / "docs" / "reference" / "documents.md"
LEAVES = ROOT / "docs" / "explanation" / "what-leaves-the-silo.md"
PROGRAMS = {"silo": silo.cli.app, "aggregator": aggregator.cli.app, "ddm": ddm.cli.main.app}
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: nothing there"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: no such heading"


def section(page: Path, heading: str) -> str:
    """The text under one heading, up to the next one of the same depth or less."""
    depth = len(heading) - len(heading.lstrip("#"))
    text = page.read_text("utf-8")
    begin = re.search(rf"^{re.escape(heading)}$", text, flags=re.MULTILINE)
    assert begin, f"{page.name} has no heading {heading!r}"
    end = re.search(rf"^#{{1,{depth}}} ", text[begin.end() :], flags=re.MULTILINE)
    return text[begin.end() :][: end.start() if end else None]


def named_in_tables(text: str) -> list[str]:
    """Everything in backticks in the first column of the section's tables."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def verbs() -> list[tuple[str, str]]:
    return [(name, verb) for name, app in PROGRAMS.items() for verb in command_group(app).commands]


def command_group(app: typer.Typer) -> click.Group:
    found: Any = typer.main.get_command(app)
    return found


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every leaf of a document by its dotted path; `[]` marks a list's elements."""
    for name, info in model.model_fields.items():
        parts = list(models_in(info.annotation))
        many = "[]" if "tuple" in str(info.annotation) and parts else ""
        if not parts:
            yield prefix + name
        for part in parts:
            yield from fields(part, f"{prefix}{name}{many}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_and_anchors_of_a_page_resolve(page: Path) -> None:
    assert not list(broken_links(page))


def test_a_link_to_nothing_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](gone.md) [b](#two) [c](#one) [d](https://example.org)\n")
    assert list(broken_links(page)) == ["gone.md: nothing there", "#two: no such heading"]


@pytest.mark.parametrize(("program", "verb"), verbs())
def test_commands_page_names_exactly_the_flags_of_a_verb(program: str, verb: str) -> None:
    command = command_group(PROGRAMS[program]).commands[verb]
    flags = {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}
    text = section(COMMANDS, f"### {program} {verb}")
    assert sorted(named_in_tables(text)) == sorted(flags)
    arguments = [str(each.metavar) for each in command.params if isinstance(each, click.Argument)]
    assert f"`{' '.join([program, verb, *arguments])}`" in text


def test_commands_page_names_exactly_the_verbs() -> None:
    headings = re.findall(r"^### (\w+) ([\w-]+)$", COMMANDS.read_text("utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(verbs())


def test_no_page_names_a_flag_that_no_command_has() -> None:
    commands = [command for app in PROGRAMS.values() for command in command_group(app).commands.values()]
    known = {flag for command in commands for option in command.params for flag in option.opts} | {"--help"}
    pages = [page for page in PAGES if "adr" not in page.parts]
    named = {
        (page.name, flag)
        for page in pages
        for line in page.read_text("utf-8").splitlines()
        if re.search(r"\b(silo|aggregator|ddm) [a-z]+\b", line)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line)
    }
    others = {"--system", "--user-group", "--shell"}
    assert not {(page, flag) for page, flag in named if flag not in known | others}


def test_what_leaves_names_exactly_the_fields_of_a_submission() -> None:
    text = section(LEAVES, "## `submission.json`, field by field")
    named = named_in_tables(text)
    assert len(named) == len(set(named))
    assert set(named) == set(fields(Submission))


@pytest.mark.parametrize("model", [Plan, Receipt, Manifest, Invitation, Card], ids=lambda model: model.__name__)
def test_documents_page_names_exactly_the_fields_of_a_document(model: type[BaseModel]) -> None:
    assert set(named_in_tables(section(DOCUMENTS, f"## {model.__name__}"))) == set(fields(model))


def test_index_links_every_page_of_the_documentation() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(index))}
    missing = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md") if page != index} - {
        path.relative_to(ROOT).as_posix() for path in linked
    }
    assert not missing


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_pages_written_from_the_code_are_current(name: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == reference.PAGES[name](), "run: make docs"


def test_python_api_has_every_public_name_of_ddm() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    assert not [name for name in ddm.__all__ if f"### `ddm.{name}`" not in page]


@pytest.mark.parametrize("page", ADRS, ids=lambda page: page.stem)
def test_a_decision_has_a_date_and_a_status(page: Path) -> None:
    title, *lines = page.read_text("utf-8").splitlines()
    assert title.startswith(f"# {page.stem[:4]}. ")
    assert re.fullmatch(r"- Date: \d{4}-\d{2}-\d{2}", lines[1])
    assert re.match(r"- Status: (accepted|superseded by \[\d{4}\])", lines[2])


def test_a_superseded_decision_and_the_later_one_name_each_other() -> None:
    pairs = {
        (word, page.stem[:4], number)
        for page in ADRS
        for word, numbers in re.findall(r"(supersedes|superseded by)(.*?\[\d{4}\])", status_of(page))
        for number in re.findall(r"\[(\d{4})\]", numbers)
    }
    assert {(later, earlier) for word, later, earlier in pairs if word == "supersedes"} == {
        (later, earlier) for word, earlier, later in pairs if word == "superseded by"
    }
    assert pairs


def status_of(page: Path) -> str:
    return page.read_text("utf-8").splitlines()[3]
