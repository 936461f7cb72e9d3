"""Badges that need no service: what pyproject.toml says, and how far the software was tried."""

import tomllib
from pathlib import Path
from typing import Any

from tools.pictures.drawing import FONT

_ROOT = Path(__file__).parent.parent.parent
_CHARACTER_WIDTH = 7
_HEIGHT = 20


def licence_badge() -> str:
    """The licence of pyproject.toml."""
    return _badge("licence", str(_project()["license"]), "#1f5f99")


def python_badge() -> str:
    """The versions of Python that pyproject.toml allows."""
    oldest = str(_project()["requires-python"]).removeprefix(">=")
    return _badge("python", f"{oldest} or newer", "#1f5f99")


def tests_badge() -> str:
    """What the default tests need."""
    return _badge("tests", "CPU, offline: make test", "#1d7a43")


def maturity_badge() -> str:
    """How far the software was tried on GPUs: docs/results/benchmarks.md."""
    return _badge("GPU", "one, for half an hour", "#b3530a")


def _project() -> dict[str, Any]:
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
    project: dict[str, Any] = settings["project"]
    return project


def _badge(subject: str, statement: str, colour: str) -> str:
    subject_width = _CHARACTER_WIDTH * len(subject) + 12
    statement_width = _CHARACTER_WIDTH * len(statement) + 12
    width = subject_width + statement_width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" role="img">\n'
        f"<title>{subject}: {statement}</title>\n"
        f'<rect width="{width}" height="{_HEIGHT}" rx="3" fill="{colour}"/>\n'
        f'<rect width="{subject_width}" height="{_HEIGHT}" rx="3" fill="#4a545e"/>\n'
        f'<g fill="#ffffff" text-anchor="middle" font-family="{FONT}" font-size="11">\n'
        f'<text x="{subject_width / 2:g}" y="14">{subject}</text>\n'
        f'<text x="{subject_width + statement_width / 2:g}" y="14">{statement}</text>\n'
        f"</g>\n</svg>\n"
    )
