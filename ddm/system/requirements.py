"""Whether this machine has the packages that this version was made for."""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ddm.system.findings import Finding
from ddm.system.version import DISTRIBUTION

_REMEDY = "Reinstall Archipelago (make setup): it installs versions that it was tested with."


def check_packages() -> Iterator[Finding]:
    """Yield what is not as this project's own metadata requires: Python and every package that no extra is for."""
    try:
        requires = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
        needed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield Finding(
            DISTRIBUTION, "an installed package", "files alone", "Install it: make setup."
        )
        return
    if platform.python_version() not in SpecifierSet(requires):
        yield Finding(
            "Python",
            requires,
            platform.python_version(),
            "Make the environment again: make setup PYTHON=...",
        )
    for requirement in needed:
        # A requirement of an extra has a marker that holds only with this extra.
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _check(requirement)


def _check(requirement: Requirement) -> Iterator[Finding]:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        yield Finding(
            requirement.name, f"{requirement.specifier} installed", "no such package", _REMEDY
        )
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield Finding(requirement.name, str(requirement.specifier), version, _REMEDY)
