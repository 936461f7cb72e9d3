"""Signatures as the source has them, read without importing it."""

import ast
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FACTORY = re.compile(r"field\(default_factory=(\w+)\)")
LONGEST = 100  # characters of a signature on one line
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module's source.

    Attributes:
        name: its dotted name.
        tree: what it says.
    """

    name: str
    tree: ast.Module

    @classmethod
    def named(cls, name: str) -> "Module":
        """Read a module without importing it."""
        path = ROOT / f"{name.replace('.', '/')}.py"
        return cls(name, ast.parse(path.read_text("utf-8")))

    def find(self, name: str) -> ast.stmt:
        """Return the statement that makes a name.

        Raises:
            KeyError: no such name.
        """
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return node
        raise KeyError(f"{self.name} has no {name}")

    def docstring_below(self, node: ast.stmt) -> str | None:
        """Return the string that documents a name of the module; None where the next statement is none."""
        for documented, below in pairwise(self.tree.body):
            if documented is node and isinstance(below, ast.Expr):
                return str(ast.literal_eval(below.value))
        return None

    def annotation(self, node: ast.expr) -> str:
        """Return an annotation as `text` does, without quotes around it."""
        return str(node.value) if isinstance(node, ast.Constant) and node.value else self.text(node)

    def text(self, node: ast.expr) -> str:
        """Return an expression as the source has it, with imported names as they are called at home."""
        renamed = {
            alias.asname: f"{line.module}.{alias.name}"
            for line in self.tree.body
            if isinstance(line, ast.ImportFrom)
            for alias in line.names
            if alias.asname and alias.asname != alias.name
        }
        written = re.sub(r"'([^'\"]*)'", r'"\1"', ast.unparse(node))
        for name, full in renamed.items():
            written = re.sub(rf"\b{name}\b", full, written)
        return written


def is_public(name: str) -> bool:
    """Whether a name is for others."""
    return not name.startswith("_")


def parameters(module: Module, arguments: ast.arguments) -> list[str]:
    """Return a signature's parameters as written, without self or cls."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
    found = [
        parameter(module, *pair)
        for pair in zip(plain, defaults, strict=True)
        if pair[0].arg not in ("self", "cls")
    ]
    if arguments.vararg:
        found.append(f"*{parameter(module, arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        found.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(parameter(module, argument, default))
    if arguments.kwarg:
        found.append(f"**{parameter(module, arguments.kwarg, None)}")
    return found


def parameter(module: Module, argument: ast.arg, default: ast.expr | None) -> str:
    """Return one parameter as written."""
    typed = (
        f"{argument.arg}: {module.annotation(argument.annotation)}"
        if argument.annotation
        else argument.arg
    )
    return f"{typed} = {module.text(default)}" if default else typed


def field(module: Module, node: ast.AnnAssign) -> str:
    """Return a dataclass's field as the parameter that it is; what a factory makes is a call."""
    typed = f"{ast.unparse(node.target)}: {module.annotation(node.annotation)}"
    if node.value is None:
        return typed
    made = FACTORY.fullmatch(module.text(node.value))
    return f"{typed} = {f'{made[1]}()' if made else module.text(node.value)}"


def code(name: str, parts: list[str], answer: str) -> str:
    """Return a signature as a block of Python, on one line where it fits."""
    line = f"{name}({', '.join(parts)}){answer}"
    if len(line) > LONGEST:
        line = "\n".join(
            [
                f"{name}(",
                *(f"    {part}," if part != "*" else "    *," for part in parts),
                f"){answer}",
            ]
        )
    return f"```python\n{line}\n```\n"
