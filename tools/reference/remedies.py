"""docs/reference/remedies.md: every remedy in the code, where it is raised, and the states in which it was typed."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ddm.errors
from ddm.errors import ArchipelagoError

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("ddm", "silo", "aggregator")
TYPED_REMEDIES = ROOT / "tests" / "support" / "typed_remedies.json"
DEFAULT = "default of the class"
HEAD = """\
# Remedies

`make docs` writes this page from the code. It lists each text that a command prints after `to do:`, with its error and
the files that raise it. The program replaces `{...}`, and the reader replaces words in capital letters.

The last column names the states in which a test causes the error with the real program, follows the remedy and types a
command again. This command succeeds unless an exit code is given. Other tests parse every command in a remedy as the
program does, with all required arguments and options, and look up every field of a recipe or a configuration file.
[Errors and exit codes](errors.md) describes the classes.

| remedy | error | where | typed in these states |
| --- | --- | --- | --- |"""
_FILLED_IN = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Remedy:
    """One remedy as it is written in the code.

    Attributes:
        text: the text, with `{expression}` where the program fills something in.
        error: the class of the error, or the function that raises it.
        place: the module, relative to the repository; `DEFAULT` for the remedy of a class.
    """

    text: str
    error: str
    place: str

    @property
    def num_fixed_characters(self) -> int:
        """The length of the text without what the program fills in."""
        return len(_FILLED_IN.sub("", self.text))

    def matches(self, printed: str) -> bool:
        """Return whether a remedy that was printed is this one, filled in."""
        parts = _FILLED_IN.split(self.text)
        # A remedy that is filled in as a whole is another error's, passed on.
        if not any(part.strip() for part in parts):
            return False
        pattern = ".*".join(re.escape(part) for part in parts)
        return re.fullmatch(pattern, printed, re.DOTALL) is not None


@cache
def remedies() -> tuple[Remedy, ...]:
    """Return every remedy of the packages: those of classes, then file by file."""
    unique: dict[Remedy, None] = {}
    for name, value in vars(ddm.errors).items():
        is_error = isinstance(value, type) and issubclass(value, ArchipelagoError)
        if is_error and "default_remedy" in vars(value):
            unique[Remedy(value.default_remedy, name, DEFAULT)] = None
    modules = list(_modules())
    positions = _positions_of_remedies(module.tree for module in modules)
    for module in modules:
        for remedy in module.remedies(positions):
            unique[remedy] = None
    return tuple(unique)


def remedies_page() -> str:
    """Return the page."""
    states_by_text: dict[str, list[str]] = {}
    for record in json.loads(TYPED_REMEDIES.read_text("utf-8")):
        states_by_text.setdefault(record["remedy"], []).append(_describe_state(record))
    errors_by_text: dict[str, list[str]] = {}
    places_by_text: dict[str, list[str]] = {}
    for remedy in remedies():
        errors_by_text.setdefault(remedy.text, []).append(f"`{remedy.error}`")
        places_by_text.setdefault(remedy.text, []).append(remedy.place)
    lines = [HEAD]
    for text in sorted(errors_by_text, key=lambda text: (errors_by_text[text][0], text)):
        cells = [
            text,
            ", ".join(dict.fromkeys(errors_by_text[text])),
            ", ".join(dict.fromkeys(places_by_text[text])),
            "; ".join(states_by_text.get(text, [])),
        ]
        lines.append(f"| {' | '.join(_escape(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _describe_state(record: dict[str, str | int]) -> str:
    ending = ""
    if record["final_code"] != 0:
        ending = f", ends with {record['final_code']}"
    return f"{record['state']} ({record['code']}{ending})"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _modules() -> "Iterator[_Module]":
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield _module_at(path)


@cache
def _module_at(path: Path) -> "_Module":
    return _Module(path)


def _positions_of_remedies(trees: Iterable[ast.Module]) -> dict[str, set[int]]:
    """Return functions and dataclasses that take a remedy by position, with its numbers among the arguments."""
    positions: dict[str, set[int]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if isinstance(node, ast.ClassDef):
                names = [
                    ast.unparse(statement.target)
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                ]
            if "remedy" in names:
                numbers = positions.setdefault(node.name, set())  # type: ignore[attr-defined]
                numbers.add(names.index("remedy"))
    return positions


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return ast.unparse(function)


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


class _Module:
    """A module, and the texts that its names stand for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text("utf-8"))

    def remedies(self, positions: dict[str, set[int]]) -> Iterator[Remedy]:
        """Yield the remedies of all calls."""
        place = str(self.path.relative_to(ROOT))
        for scope in self._scopes():
            for node in ast.walk(scope):
                if isinstance(node, ast.Call):
                    error = _name_of(node.func)
                    for text in self._remedies_of_call(node, scope, positions.get(error, set())):
                        yield Remedy(text, error, place)
                # An error that is passed on with another remedy.
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "error.remedy":
                    for text in self._texts(node.value, scope, ()):
                        yield Remedy(text, "error", place)

    def _remedies_of_call(
        self, call: ast.Call, scope: ast.AST, positions: set[int]
    ) -> Iterator[str]:
        for keyword in call.keywords:
            if keyword.arg == "remedy":
                yield from self._texts(keyword.value, scope, ())
        for position in positions:
            if position < len(call.args):
                for text in self._texts(call.args[position], scope, ()):
                    # Functions of one name may take something else there; a remedy is a sentence.
                    if text[0].isupper() and text.endswith("."):
                        yield text

    def _scopes(self) -> Iterator[ast.AST]:
        """Yield every function, innermost last, and the module itself for what is outside of all."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                yield node
        outside = [
            statement
            for statement in self.tree.body
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        ]
        yield ast.Module(outside, [])

    def _texts(self, value: ast.expr, scope: ast.AST, visited: tuple[str, ...]) -> list[str]:
        """Return the texts that an expression may be, each as a template."""
        match value:
            case ast.Constant(value=str(text)) if text:
                return [text]
            case ast.JoinedStr():
                return [_template(value)]
            case ast.IfExp():
                return [
                    *self._texts(value.body, scope, visited),
                    *self._texts(value.orelse, scope, visited),
                ]
            case ast.BoolOp():
                return [text for part in value.values for text in self._texts(part, scope, visited)]
            case ast.Name(id=name) if name not in visited:
                return self._texts_of_name(name, scope, (*visited, name))
            case ast.Call() if _name_of(value.func) not in visited:
                name = _name_of(value.func)
                return self._texts_of_function(name, (*visited, name))
        return []

    def _texts_of_name(self, name: str, scope: ast.AST, visited: tuple[str, ...]) -> list[str]:
        """Return the texts that are assigned to a name: in its function, else in the module, else where it is from."""
        for place in (scope, self.tree):
            texts = []
            for node in ast.walk(place):
                if isinstance(node, ast.Assign) and _assigns(node, name):
                    texts += self._texts(node.value, place, visited)
            if texts:
                return texts
        source = self._source_of(name)
        if source is None:
            return []
        return source._texts_of_name(name, source.tree, visited)

    def _texts_of_function(self, name: str, visited: tuple[str, ...]) -> list[str]:
        """Return the texts that a function returns."""
        texts = []
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef) and function.name == name:
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and node.value is not None:
                        texts += self._texts(node.value, function, visited)
        source = self._source_of(name)
        if source is not None:
            texts += source._texts_of_function(name, visited)
        return texts

    def _source_of(self, name: str) -> "_Module | None":
        """Return the module of ours from which a name is imported."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                path = ROOT.joinpath(*str(node.module).split("."))
                for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                    if candidate.is_file():
                        return _module_at(candidate)
        return None


def _template(value: ast.JoinedStr) -> str:
    parts = []
    for part in value.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        if isinstance(part, ast.FormattedValue):
            expression = ast.unparse(part.value).replace("{", "(").replace("}", ")")
            parts.append(f"{{{expression}}}")
    return "".join(parts)
