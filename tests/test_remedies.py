"""What an error says to do: its commands, options and fields exist, and done as given it helps."""

import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pydantic
import pytest
import typer

import aggregator.config
import silo.config
from aggregator.planning.recipe import Recipe
from ddm.protocol.plan import Plan
from tests.support.commands import APPS
from tests.support.mistakes import WaitingFederation, type_remedy
from tests.support.remedy_states import REMEDY_STATES
from tests.support.typed_remedies import recorded_remedies
from tests.test_mistakes import MISTAKES
from tools.reference.remedies import Remedy, remedies

COMMAND = re.compile(r"`((?:silo|aggregator|ddm) [^`]*)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
FIELD = re.compile(r"(?<![\w./({])[a-z_]++(?:\.[a-z_]++)++(?![\w(}])")
# Values that the program fills in: of these words the test knows one, any other stands for a word.
FILLED_IN = {"{name}s": "images", "{unit}": "images"}
FOREIGN_FLAGS = {"--append", "--groups"}
FILE_ENDINGS = {
    *("toml", "json", "jsonl", "pem", "key", "sqlite", "log", "npz", "png", "py", "md", "salt"),
    *("safetensors", "parquet", "html", "txt"),
}
FOREIGN_NAMES = {
    "torch.load",
    "safetensors.torch.save_file",
    "examples.paper.classifier",
    "aggregator.example.org",
    "ddm.encoders.timm",
}


def commands_by_name() -> dict[str, click.Command]:
    """Return every command of the three programs, by its name as it is typed."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for part, below in command.commands.items():
                yield from walk(f"{name} {part}", below)
        else:
            yield name, command

    found: dict[str, click.Command] = {}
    for program, app in APPS.items():
        found.update(walk(program, typer.main.get_command(app)))
    return found


COMMANDS = commands_by_name()


def filled_in(text: str) -> str:
    for expression, value in FILLED_IN.items():
        text = text.replace(expression, value)
    return re.sub(r"\{[^{}]*\}", "VALUE", text)


def faults_of_command(line: str) -> list[str]:
    """Return what a program would refuse in a command, as far as it follows from its words."""
    words = shlex.split(filled_in(line))
    for num_words in (3, 2):
        name = " ".join(words[:num_words])
        if name in COMMANDS:
            break
    else:
        return [f"no command: {line}"]
    command = COMMANDS[name]
    try:
        options, rest, _ = command.make_parser(click.Context(command)).parse_args(words[num_words:])
    except click.UsageError as error:
        return [f"{line}: {error.message}"]
    if "help" in options:
        return []
    faults = []
    for parameter in command.params:
        # What was not given is None, or a mark of click's own.
        is_given = isinstance(options.get(str(parameter.name)), str | list | tuple)
        if parameter.required and not is_given:
            faults.append(f"{line}: no {parameter.name}")
    if rest:
        faults.append(f"{line}: {rest} are too much")
    return faults


def test_commands_in_remedies_are_complete_as_they_are_given() -> None:
    faults = []
    num_commands = 0
    for remedy in remedies():
        for line in COMMAND.findall(remedy.text):
            num_commands += 1
            faults += [f"{remedy.place}: {fault}" for fault in faults_of_command(line)]
    assert not faults, "\n".join(faults)
    assert num_commands > 100


@pytest.mark.parametrize(
    "line", ["silo withdraw", "silo runs SITE", "silo run SITE --fast", "silo run SITE SITE"]
)
def test_command_that_a_program_refuses_is_noticed(line: str) -> None:
    assert faults_of_command(line)


def test_commands_of_ours_stand_in_backticks_where_a_remedy_names_them() -> None:
    names = "|".join(map(re.escape, COMMANDS))
    faults = []
    for remedy in remedies():
        prose = re.sub(r"`[^`]*`", "", remedy.text)
        faults += [(remedy.place, name) for name in re.findall(rf"\b(?:{names})\b", prose)]
    assert not faults


def test_options_in_remedies_exist() -> None:
    known = set(FOREIGN_FLAGS) | {"--help"}
    for command in COMMANDS.values():
        for parameter in command.params:
            known.update(parameter.opts)
    unknown = {
        (remedy.place, flag)
        for remedy in remedies()
        for flag in FLAG.findall(COMMAND.sub("", filled_in(remedy.text)))
        if flag not in known
    }
    assert not unknown


def field_names(kind: object, prefix: str = "") -> Iterator[str]:
    """Yield the fields of a model with dots between their parts, as files and remedies write them."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        for name, field in kind.model_fields.items():
            yield prefix + name
            yield from field_names(field.annotation, f"{prefix}{name}.")
    for part in typing.get_args(kind):
        yield from field_names(part, prefix)


def test_fields_in_remedies_exist_in_a_recipe_a_plan_or_a_configuration_file() -> None:
    roots = [Recipe, Plan, *vars(aggregator.config).values(), *vars(silo.config).values()]
    known = {name for root in roots if isinstance(root, type) for name in field_names(root)}
    assert "privacy.budget_epsilon" in known
    unknown = set()
    for remedy in remedies():
        for name in FIELD.findall(filled_in(remedy.text)):
            is_file = name.rpartition(".")[2] in FILE_ENDINGS
            if not is_file and name not in known | FOREIGN_NAMES:
                unknown.add((remedy.place, name))
    assert not unknown


def test_remedy_of_a_class_of_many_errors_names_nothing_that_only_some_have() -> None:
    # "Check the data file against the plan's shape and range" stood under a mask, a table and a missing column.
    general = {
        remedy.error: remedy.text for remedy in remedies() if remedy.place.startswith("default")
    }
    assert not re.search("shape|range|column|file", general["DataError"])


@pytest.fixture(scope="module")
def world_once(tmp_path_factory: pytest.TempPathFactory) -> WaitingFederation:
    return WaitingFederation.create(tmp_path_factory.mktemp("remedies") / "Süd 1")


@pytest.mark.parametrize("state", REMEDY_STATES)
def test_remedy_helps_when_it_is_done_as_given(
    state: str, world_once: WaitingFederation, tmp_path: Path
) -> None:
    world = world_once.copy(tmp_path / "Süd 1")
    typed_remedy = type_remedy(state, REMEDY_STATES[state], world)
    assert typed_remedy == recorded_remedies()[state], (
        "write the record again: python -m tests.support.typed_remedies"
    )


def test_record_names_the_mistakes_and_states_there_are_and_remedies_of_the_code() -> None:
    recorded = recorded_remedies()
    assert recorded.keys() <= MISTAKES.keys() | REMEDY_STATES.keys()
    assert REMEDY_STATES.keys() <= recorded.keys()
    assert len(recorded) >= 90
    texts = {remedy.text for remedy in remedies()}
    gone = [record.state for record in recorded.values() if record.remedy not in texts]
    assert not gone


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("Add {option}.", "Add --yes."),
        ("Run `silo run {site.path}`.", "Run `silo run a/b c`."),
    ],
)
def test_printed_remedy_is_recognised_by_its_text_in_the_code(text: str, printed: str) -> None:
    assert Remedy(text, "SetupError", "a.py").matches(printed)
    assert not Remedy(text, "SetupError", "a.py").matches("Do " + printed)
