"""Fills the page templates; every inserted value is escaped as text, never treated as markup."""

import json
import re
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ddm.system.console import human_bytes, human_seconds

MAX_NAMED_CLASSES = 64  # whose names a page shows; a plan may have 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_EXPONENT = re.compile(r"^(-?\d+)e")
_LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
# Characters that begin markup, and what makes a bare address a link for readers of Markdown.
_MARKDOWN = re.compile(r"[\\`*_{}\[\]#|~!$@^]|(?<=www)\.|:(?=//)")
_HTML = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


def markdown_text(value: object) -> str:
    """Escape free text for Markdown: one line, no markup, no HTML, no link."""
    if isinstance(value, Markup):
        return str(value)
    line = _CONTROL.sub(" ", str(value)).strip()
    return _MARKDOWN.sub(r"\\\g<0>", line).translate(_HTML)


def render(package: str, name: str, **values: object) -> str:
    """Fill a template; a missing value is an error.

    Args:
        package: holds it in its folder `pages/templates`; what the template includes may also be in that of `ddm`.
        name: `<page>.html.jinja` or `<page>.md.jinja`.
        values: what it names.
    """
    environment = _html(package)
    if name.endswith(".md.jinja"):
        environment = _markdown(package)
    return environment.get_template(name).render(values)


@cache
def _html(package: str) -> Environment:
    return _environment(package, autoescape=True)


@cache
def _markdown(package: str) -> Environment:
    return _environment(package, finalize=markdown_text)


def _environment(package: str, **escaping: Any) -> Environment:
    # A package's own templates come before those of `ddm` with the same name.
    packages = dict.fromkeys((package, "ddm"))
    loaders = [PackageLoader(name, "pages/templates") for name in packages]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **escaping,
    )
    environment.globals["MAX_NAMED_CLASSES"] = MAX_NAMED_CLASSES
    environment.filters |= {
        "bytes": human_bytes,
        "seconds": human_seconds,
        "yaml": _yaml,
        "licence_id": _licence_id,
    }
    return environment


def _yaml(value: object) -> Markup:
    """Write a value as YAML: JSON in ASCII, except that YAML needs a decimal point in numbers such as 1e-05."""
    encoded = json.dumps(value)
    if isinstance(value, float):
        encoded = _EXPONENT.sub(r"\1.0e", encoded)
    return Markup(encoded)


def _licence_id(licence: str) -> Markup:
    """Write a licence identifier for a model card, such as cc-by-4.0; `other` for free text."""
    if _LICENCE.fullmatch(licence):
        return _yaml(licence.lower())
    return _yaml("other")
