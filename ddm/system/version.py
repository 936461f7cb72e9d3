"""The version of this toolkit, as it is installed."""

from importlib import metadata

# As the package index knows it; the programs and packages have names of their own.
DISTRIBUTION = "archipelago-ddm"


def installed_version() -> str:
    """Return the version, such as ``0.1.0``."""
    return metadata.version(DISTRIBUTION)


def software_versions() -> dict[str, str]:
    """Return the versions that a signed document names: this toolkit's and torch's, by distribution."""
    return {name: metadata.version(name) for name in (DISTRIBUTION, "torch")}
