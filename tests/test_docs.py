"""The documentation against the code: links resolve; every flag and every field has its line, and none is invented."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import pytest
import typer
from pydantic import BaseModel

import aggregator.cli
import ddm
import ddm.cli.main
import silo.cli
from aggregator.config import FederationSettings
from ddm.cli.settings import DrawingSettings, SampleSettings, SampleStudentSettings
from ddm.protocol.enrolment import Card, Invitation
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Receipt
from ddm.protocol.submission import Submission
from ddm.transport import messages
from silo.config import Policy, SiloSettings
from silo.worker.descriptions import Circumstances
from silo.worker.state import State
from silo.worker.status import SiteStatus
from tests.support.case import case
from tests.test_architecture import ROOMS
from tools import reference
from tools.reference.decisions import decision_pages
from tools.site.navigation import HOME, SECTIONS, listed_pages, navigation_of

ROOT = Path(__file__).parent.parent
FOLDERS = (".github", "docs", "examples", "ddm", "silo", "aggregator", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
DOCUMENTS = ROOT / "docs" / "reference" / "documents.md"
LEAVES = ROOT / "docs" / "explanation" / "what-leaves-the-silo.md"
CODE_MAP = ROOT / "docs" / "explanation" / "code-map.md"
FOLDERS_PAGE = ROOT / "docs" / "reference" / "folders.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
ERRORS = ROOT / "docs" / "reference" / "errors.md"
TROUBLESHOOTING = sorted((ROOT / "docs" / "how-to").glob("troubleshoot-*.md"))
POLICY = ROOT / "docs" / "reference" / "policy.md"
DECISIONS_AND_RESULTS = {"adr", "results"}  # dated records, which keep the words of their day
GUIDES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not DECISIONS_AND_RESULTS & set(page.relative_to(ROOT).parts)
]
PROGRAMS = {"silo": silo.cli.app, "aggregator": aggregator.cli.app, "ddm": ddm.cli.main.app}
THREATS = ROOT / "docs" / "explanation" / "threat-model.md"
TRUST = ROOT / "docs" / "explanation" / "trust.md"
ADRS = decision_pages()
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
    return [(name, verb) for name, app in PROGRAMS.items() for verb in commands_of(app)]


def commands_of(app: typer.Typer) -> dict[str, click.Command]:
    """Every command of a program by its name; one of a group has two words."""
    commands: dict[str, click.Command] = {}
    for name, command in command_group(app).commands.items():
        if isinstance(command, click.Group):
            commands |= {
                f"{name} {inner_name}": inner for inner_name, inner in command.commands.items()
            }
        else:
            commands[name] = command
    return commands


def command_group(app: typer.Typer) -> click.Group:
    group: Any = typer.main.get_command(app)
    return group


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


def test_relative_links_and_anchors_of_a_page_resolve() -> None:
    links = {page.relative_to(ROOT).as_posix(): list(broken_links(page)) for page in PAGES}
    assert not {page: broken for page, broken in links.items() if broken}


def test_a_link_to_nothing_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](gone.md) [b](#two) [c](#one) [d](https://example.org)\n")
    assert list(broken_links(page)) == ["gone.md: nothing there", "#two: no such heading"]


def tables_of(page: Path) -> Iterator[list[str]]:
    """Each run of lines that begin with a bar, code blocks aside."""
    rows: list[str] = []
    is_code = False
    for line in [*page.read_text("utf-8").splitlines(), ""]:
        row = line.strip()
        if row.startswith("```"):
            is_code = not is_code
        if row.startswith("|") and not is_code:
            rows.append(row)
        elif rows:
            yield rows
            rows = []


def broken_tables(page: Path) -> Iterator[str]:
    """The header of each table that readers see as text: wrapped into a paragraph, or with a row of other length."""
    for rows in tables_of(page):
        has_delimiter = len(rows) > 1 and re.fullmatch(r"\|( ?:?-+:? ?\|)+", rows[1]) is not None
        lengths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        if not has_delimiter or len(lengths) > 1:
            yield rows[0]


def test_rows_of_a_table_have_as_many_cells_as_its_header() -> None:
    tables = {page.relative_to(ROOT).as_posix(): list(broken_tables(page)) for page in PAGES}
    assert not {page: broken for page, broken in tables.items() if broken}


def test_a_table_that_is_none_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| right | table |\n| --- | ---: |\n| 1 | 2 |\n\n"
        "| wrapped | row | | --- | --- | | into |\na paragraph |\n\n"
        "| short | row |\n| --- | --- |\n| 1 |\n"
    )
    assert list(broken_tables(page)) == [
        "| wrapped | row | | --- | --- | | into |",
        "| short | row |",
    ]


def test_commands_page_names_exactly_the_flags_of_a_verb() -> None:
    for program, verb in verbs():
        with case(program=program, verb=verb):
            command = commands_of(PROGRAMS[program])[verb]
            flags = {
                flag
                for option in command.params
                if isinstance(option, click.Option)
                for flag in option.opts
            }
            text = section(COMMANDS, f"### {program} {verb}")
            assert sorted(named_in_tables(text)) == sorted(flags)
            arguments = [
                str(param.metavar) for param in command.params if isinstance(param, click.Argument)
            ]
            assert f"`{' '.join([program, verb, *arguments])}`" in text


def test_commands_page_names_exactly_what_status_prints_for_scripts() -> None:
    (row,) = (
        line
        for line in section(COMMANDS, "### silo status").splitlines()
        if line.startswith("| `--json`")
    )
    status = SiteStatus(
        "north",
        "/srv/north",
        State(),
        Circumstances(running=False),
        pause=None,
        note=None,
        audit=None,
    )
    assert re.findall(r"`(\w+)`", row) == list(status.as_json())


@pytest.mark.parametrize("program", PROGRAMS)
def test_commands_page_names_exactly_the_options_of_every_program(program: str) -> None:
    flags = {flag for option in command_group(PROGRAMS[program]).params for flag in option.opts}
    assert sorted(named_in_tables(section(COMMANDS, "## Logging"))) == sorted(flags)


def test_commands_page_names_exactly_what_set_changes() -> None:
    text = section(COMMANDS, "### What --set changes")
    assert named_in_tables(text) == list(SampleSettings.names())
    for command, settings in (
        ("sample-student", SampleStudentSettings),
        ("evaluate", DrawingSettings),
    ):
        of_command = [line for line in text.splitlines() if f"`ddm {command}`" in line]
        assert named_in_tables("\n".join(of_command)) == list(settings.names())


def test_commands_page_names_exactly_the_verbs() -> None:
    headings = re.findall(
        r"^### (silo|aggregator|ddm) ([\w-]+(?: [\w-]+)?)$",
        COMMANDS.read_text("utf-8"),
        flags=re.MULTILINE,
    )
    assert sorted(headings) == sorted(verbs())


def test_help_shows_every_word_of_an_option() -> None:
    # The terminal's markup takes a word in brackets for a style, and drops it.
    shown = [
        option
        for app in PROGRAMS.values()
        for command in commands_of(app).values()
        for option in command.params
    ]
    assert not [option.name for option in shown if "[" in (getattr(option, "help", None) or "")]


def test_no_page_names_a_flag_that_no_command_has() -> None:
    commands = [command for app in PROGRAMS.values() for command in commands_of(app).values()]
    programs = [command_group(app) for app in PROGRAMS.values()]
    known = {
        flag
        for command in [*commands, *programs]
        for option in command.params
        for flag in option.opts
    }
    known.add("--help")
    pages = [page for page in PAGES if "adr" not in page.parts]
    named = {
        (page.name, flag)
        for page in pages
        for line in page.read_text("utf-8").splitlines()
        if re.search(r"\b(silo|aggregator|ddm) [a-z]+\b", line)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line)
    }
    assert not {(page, flag) for page, flag in named if flag not in known}


def test_what_leaves_names_exactly_the_fields_of_a_submission() -> None:
    text = section(LEAVES, "## `submission.json`, field by field")
    named = named_in_tables(text)
    assert len(named) == len(set(named))
    assert set(named) == set(fields(Submission))


def test_documents_page_names_exactly_the_fields_of_a_document() -> None:
    for model in (Plan, Receipt, Manifest, Invitation, Card):
        assert set(named_in_tables(section(DOCUMENTS, f"## {model.__name__}"))) == set(
            fields(model)
        ), model.__name__


SETTINGS = [
    (POLICY, "# policy.toml", Policy),
    (FOLDERS_PAGE, "## site/", SiloSettings),
    (FOLDERS_PAGE, "## fed/", FederationSettings),
]


@pytest.mark.parametrize(
    ("page", "heading", "model"), SETTINGS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_page_names_exactly_the_fields_of_a_configuration_file(
    page: Path, heading: str, model: type[BaseModel]
) -> None:
    assert sorted(named_in_tables(section(page, heading))) == sorted(fields(model))


def typed_commands() -> list[tuple[str, tuple[str, ...]]]:
    """Every command of ours that a page shows as typed: the page's name, and the command's words."""
    examples = []
    for page in GUIDES:
        for block in re.findall(
            r"^```console$(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        ):
            for line in re.sub(r"\\\n[> ]*", "", block).splitlines():
                typed = re.match(r"[$#>] +(?:.*(?: -- |\bdo ))?((?:silo|aggregator|ddm) .*)", line)
                if typed:
                    words = shlex.shlex(typed[1], posix=True, punctuation_chars=True)
                    examples.append(
                        (
                            page.name,
                            tuple(takewhile(lambda word: word not in (";", "&", "|"), words)),
                        )
                    )
    return examples


@pytest.mark.parametrize(("page", "command"), typed_commands())
def test_a_typed_command_has_the_arguments_and_options_of_its_verb(
    page: str, command: tuple[str, ...]
) -> None:
    program, verb, *arguments = command
    known = command_group(PROGRAMS[program]).commands[verb]
    required = {
        option.opts[0]
        for option in known.params
        if option.required and isinstance(option, click.Option)
    }
    assert not required - set(arguments)
    values, _, _ = known.make_parser(click.Context(known)).parse_args(list(arguments))
    assert all(
        values.get(param.name)
        for param in known.params
        if isinstance(param, click.Argument) and param.required
    )


def snippets() -> list[tuple[str, ast.Module]]:
    """The Python that pages show."""
    return [
        (page.name, ast.parse(block))
        for page in GUIDES
        if page.name != "api.md"  # signatures, written from the code
        for block in re.findall(
            r"^```python$(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
    ]


def test_python_on_a_page_imports_what_is_there() -> None:
    imports = [
        (node.module, alias.name)
        for page_name, tree in snippets()
        # Its examples import what its diffs add; tests/test_extending.py runs them.
        if page_name != "extending.md"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOMS
        for alias in node.names
    ]
    assert imports
    assert not [
        (module, name) for module, name in imports if not hasattr(import_module(module), name)
    ]


def words_to_avoid() -> list[str]:
    rows = re.findall(r"^\| ([^|]+) \|", section(GLOSSARY, "## Words to avoid"), re.MULTILINE)
    return [word for row in rows[2:] for word in row.split(", ")]


def test_no_page_uses_a_word_that_the_glossary_avoids() -> None:
    words = words_to_avoid()
    assert words
    avoided = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    wrong = {
        f"{page.name}: {match[0]}"
        for page in GUIDES
        if page != GLOSSARY
        for match in avoided.finditer(re.sub(r"`[^`]*`", "", prose(page)))
    }
    assert not wrong


def test_glossary_has_each_word_once_and_in_order() -> None:
    words = re.findall(
        r"^\| ([^|]+) \|", section(GLOSSARY, "# Glossary").split("## ")[0], re.MULTILINE
    )[2:]
    assert words == sorted(set(words), key=str.lower)


def navigation() -> list[str]:
    """The pages that the index and its sections list, in the order of the site's navigation."""
    pages = []
    for page in (HOME, *SECTIONS):
        entries = listed_pages(page, (ROOT / page).read_text("utf-8"))
        pages += [entry.path for entry in entries]
    return pages


def test_sections_list_every_page_of_the_documentation_once() -> None:
    pages = navigation()
    assert len(pages) == len(set(pages))
    # Decisions have a list of their own, which is written from their pages.
    decisions = {page.relative_to(ROOT).as_posix() for page in ADRS}
    written = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert not written - decisions - {HOME} - set(pages)
    assert not [page for page in pages if not (ROOT / page).is_file()]


def test_lists_of_a_page_are_its_children_and_other_links_are_not() -> None:
    text = (
        "[one](one.md)\n\n- [Two](how-to/two.md): see [three](three.md)\n- [Two](how-to/two.md)\n"
    )
    directive = navigation_of(SECTIONS[0], text).split()
    assert directive[-4:] == [":hidden:", "Two", "</docs/how-to/two>", "```"]
    assert navigation_of("docs/how-to/two.md", text) == ""


def test_troubleshooting_explains_every_exit_code() -> None:
    listed = re.findall(r"^\| (\d+) \|", ERRORS.read_text("utf-8"), re.MULTILINE)
    explained: set[str] = set()
    for page in TROUBLESHOOTING:
        for cell in re.findall(r"^\| ([^|]+) \|", page.read_text("utf-8"), re.MULTILINE):
            explained |= set(re.findall(r"\b\d+\b", cell))
    assert TROUBLESHOOTING
    assert explained == set(listed) - {"0"}


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_pages_written_from_the_code_are_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text("utf-8") == reference.PAGES[name](), "run: make docs"


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
        for word, numbers in re.findall(
            r"(supersedes|superseded by)(.*?\[\d{4}\])", status_of(page)
        )
        for number in re.findall(r"\[(\d{4})\]", numbers)
    }
    assert {(later, earlier) for word, later, earlier in pairs if word == "supersedes"} == {
        (later, earlier) for word, earlier, later in pairs if word == "superseded by"
    }
    assert pairs


def status_of(page: Path) -> str:
    return page.read_text("utf-8").splitlines()[3]


def code_map_rooms() -> list[str]:
    return re.findall(
        r"^\| `((?:ddm|silo|aggregator)/[\w/]+(?:\.py)?)` \|",
        CODE_MAP.read_text("utf-8"),
        re.MULTILINE,
    )


def room_path(package: str, room: str) -> str:
    return f"{package}/{room}/" if (ROOT / package / room).is_dir() else f"{package}/{room}.py"


def test_code_map_has_exactly_one_line_for_every_room() -> None:
    assert sorted(code_map_rooms()) == sorted(
        room_path(package, room) for package in ROOMS for room in ROOMS[package]
    )


def places_in_picture() -> dict[str, dict[str, tuple[int, int]]]:
    """Where the picture shows each word, by package: its line and column. `ddm` lies below the other two."""
    lines = CODE_MAP.read_text("utf-8").split("```")[1].splitlines()
    ground = lines.index(" ddm/")
    wall = lines[1].index("aggregator/") - 1
    places: dict[str, dict[str, tuple[int, int]]] = {package: {} for package in ROOMS}
    for number, line in enumerate(lines):
        for word in re.finditer(r"\w+", line):
            package = "ddm" if number > ground else "silo" if word.start() < wall else "aggregator"
            places[package].setdefault(word[0], (number, word.start()))
    return places


@pytest.mark.parametrize("package", ROOMS)
def test_picture_of_the_code_map_has_every_room_above_or_left_of_those_that_it_imports(
    package: str,
) -> None:
    place = places_in_picture()[package]
    assert not set(ROOMS[package]) - set(place)
    arrows = {
        (room, target) for room, targets in ROOMS[package].items() for target in targets.split()
    }
    assert not {(room, target) for room, target in arrows if place[room] >= place[target]}


class Step(NamedTuple):
    """One row of a walk: its file, how it is reached, and from which earlier step."""

    file: str
    kind: str
    handed_over: str | None
    before: str


REACHED = re.compile(r"(?:(call|file|message) (?:`([^`]+)` )?from|(result) of) (\d+)")


def walks() -> dict[str, list[Step]]:
    """The walks of the code map by their headings; the first step of each is where it enters."""
    steps_by_heading = {}
    for heading in re.findall(r"^### .+$", CODE_MAP.read_text("utf-8"), re.MULTILINE):
        rows = re.findall(
            r"^\| (\d+) \| (.*?) ?\| `([^`]+)` \|", section(CODE_MAP, heading), re.MULTILINE
        )
        assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)), heading
        steps = [Step(rows[0][2], "", None, rows[0][2])]
        for number, reached, file in rows[1:]:
            match = REACHED.fullmatch(reached)
            assert match and int(match[4]) < int(number), f"{heading}, step {number}: {reached!r}"
            steps.append(Step(file, match[1] or match[3], match[2], steps[int(match[4]) - 1].file))
        steps_by_heading[heading] = steps
    return steps_by_heading


def test_code_map_has_a_walk_of_a_plan_of_a_picture_of_an_image_and_of_an_expert() -> None:
    assert [re.match(r"### An? ([a-z]+)", heading)[1] for heading in walks()] == [
        "plan",
        "picture",
        "image",
        "expert",
    ]  # type: ignore[index]


def test_every_file_that_the_code_map_names_exists() -> None:
    named = re.findall(r"`((?:ddm|silo|aggregator)/[\w/.]+)`", CODE_MAP.read_text("utf-8"))
    assert not [file for file in named if not (ROOT / file).exists()]


def test_every_step_of_a_walk_follows_an_import_or_a_named_hand_over() -> None:
    lost = {
        f"{heading}: {step}"
        for heading, steps in walks().items()
        for step in steps[1:]
        if not follows(step)
    }
    assert not lost


def follows(step: Step) -> bool:
    source, earlier = ((ROOT / name).read_text("utf-8") for name in (step.file, step.before))
    if step.kind == "call":
        return module_name(step.file) in set(imported_names(ROOT / step.before))
    if step.kind == "result":
        return module_name(step.before) in set(imported_names(ROOT / step.file))
    assert step.handed_over
    if step.kind == "message":
        return hasattr(messages, step.handed_over) and all(
            step.handed_over in text for text in (source, earlier)
        )
    # A folder that both sides name, under a path of the page on folders.
    folder = [part for part in step.handed_over.split("/") if part and "<" not in part][-1]
    return step.handed_over in FOLDERS_PAGE.read_text("utf-8") and all(
        folder in text for text in (source, earlier)
    )


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_a_step_along_no_arrow_is_noticed() -> None:
    assert not follows(Step("silo/privacy/ledger.py", "call", None, "silo/courier/handlers.py"))
    assert not follows(
        Step("silo/courier/handlers.py", "message", "Telegram", "aggregator/transfer/delivery.py")
    )
    assert not follows(
        Step("silo/worker/worker.py", "file", "attic/<plan>/", "silo/courier/handlers.py")
    )


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the names of a file's functions; most files stand in many rows."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_test_that_the_page_on_trust_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TRUST.read_text("utf-8"))
    assert named
    for path, test in named:
        with case(test=test):
            assert test in functions_of(path)


def test_each_row_of_the_threat_model_names_a_test_that_exists() -> None:
    lines = THREATS.read_text("utf-8").splitlines()
    rows = []
    for line, next_line in pairwise(lines):
        # The rule below a table's head, and the head.
        is_head = line.startswith("| ---") or next_line.startswith("| ---")
        if line.startswith("| ") and not is_head:
            rows.append(line.strip("| ").split(" | "))
    assert rows
    for row in rows:
        with case(row[2]):
            assert len(row) == 5 and all(row)
            path, _, test = row[4].strip("`").partition("::")
            assert test in functions_of(path)
    assert len({tuple(row) for row in rows}) == len(rows)


# The tutorial

TUTORIAL = ROOT / "docs" / "tutorial.md"
MAX_COMMANDS = 18


def commands_to_the_grid() -> list[str]:
    """What a reader of the tutorial types, from the clone to the first grid of samples."""
    blocks = re.findall(r"^```console\n(.*?)^```", TUTORIAL.read_text("utf-8"), re.M | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    ending = [command.startswith("ddm sample ") for command in commands].index(True)
    return commands[: ending + 1]


def test_tutorial_leads_from_the_clone_to_a_grid_in_few_commands() -> None:
    commands = commands_to_the_grid()
    assert commands[0].startswith("git clone ")
    assert len(commands) <= MAX_COMMANDS
    # Loops and chains would be several commands in one line.
    unquoted = [re.sub(r'"[^"]*"', "", command) for command in commands]
    assert not [command for command in unquoted if re.search(r"^for |;|&&|\|", command)]
    assert f"{len(commands)} commands lead from a clone" in TUTORIAL.read_text("utf-8")


def test_demo_runs_the_commands_of_the_tutorial() -> None:
    source = "".join(
        (ROOT / "examples" / name).read_text("utf-8")
        for name in ("shell.py", "digits_three_silos/run.py")
    )
    typed = {tuple(command.split()[:2]) for command in commands_to_the_grid()}
    ours = {words for words in typed if words[0] in PROGRAMS}
    assert ("silo", "join") in ours
    for program, verb in ours:
        assert re.search(rf'"{program}",\s*"{verb}"', source), (
            f"the demo never runs {program} {verb}"
        )
