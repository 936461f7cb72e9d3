"""Reads the address of a release on a host: a web address, or a repository of the Hugging Face Hub.

The rules about web addresses are here too, as pure functions: which one may be fetched from at all, and which belong
to one host.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from ddm.errors import SetupError

MAX_URL_LENGTH = 2000
DEFAULT_PORTS = {"https": 443, "http": 80}

# Visible ASCII: a blank or a line end in an address would end the line of the request that it stands in.
_VISIBLE = re.compile(r"[!-~]+")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_HUB_PREFIX = "hf://"
_EXPECTED = "a folder, https://HOST/PATH, or hf://OWNER/NAME[@REVISION]"


@dataclass(frozen=True)
class WebAddress:
    """A release on a web host.

    Attributes:
        url: that of the folder with `metadata/` and `targets/`, without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class HubAddress:
    """A release in a model repository of the Hugging Face Hub.

    Attributes:
        repository: its owner and name, joined by a slash.
        revision: a branch, a tag or a commit.
    """

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{_HUB_PREFIX}{self.repository}@{self.revision}"


Address = WebAddress | HubAddress


def read_address(text: str) -> Address | None:
    """Read where a release is; None for a path of this machine.

    Raises:
        SetupError: an address of another kind, or one that may not be fetched from.
    """
    if "://" not in text:
        return None
    if text.startswith(_HUB_PREFIX):
        return _read_hub_address(text)
    problem = url_problem(text)
    if problem is None and not set(text).isdisjoint("?#"):
        problem = "an address with a query or a fragment"
    if problem is not None:
        raise SetupError(ascii(text[:200]), expected=_EXPECTED, got=problem)
    return WebAddress(text.rstrip("/"))


def _read_hub_address(text: str) -> HubAddress:
    repository, at, revision = text.removeprefix(_HUB_PREFIX).partition("@")
    if not at:
        revision = "main"
    is_revision = _REVISION.fullmatch(revision) is not None and ".." not in revision
    if _REPOSITORY.fullmatch(repository) is None or ".." in repository or not is_revision:
        raise SetupError(
            ascii(text[:200]),
            expected="hf://OWNER/NAME or hf://OWNER/NAME@REVISION",
            got="a name that is not valid on the Hub",
        )
    return HubAddress(repository, revision)


def url_problem(url: str) -> str | None:
    """Return why nothing may be fetched from a web address; None where it may.

    Without TLS, anybody on the way can read and change what is fetched; on loopback there is nobody.
    """
    if len(url) > MAX_URL_LENGTH:
        return f"an address of {len(url)} characters"
    if _VISIBLE.fullmatch(url) is None or "\\" in url:
        return "an address with characters that do not belong there"
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "an address that cannot be read"
    if parts.scheme not in DEFAULT_PORTS:
        return f"an address of kind {parts.scheme[:20]}://"
    if not has_host:
        return "an address without a host"
    if parts.username is not None:
        # It would be in the history of the shell, and in every message.
        return "an address with a user's name or password"
    if parts.scheme == "http" and not is_loopback(parts):
        return "http:// to another machine, which whoever is on the way can read and change"
    return None


def is_loopback(parts: SplitResult) -> bool:
    """Whether an address leads to this machine alone."""
    host = parts.hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a web address in which `url_problem` finds nothing wrong."""
    parts = urlsplit(url)
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    return parts.scheme, parts.hostname or "", port
