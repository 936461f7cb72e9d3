"""The address at which silos reach an aggregator: a host and a port."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAX_NAME_LENGTH = 253  # RFC 1035, 2.3.4, without the length octets
_MAX_PORT = 65535


def is_host(text: str) -> bool:
    """Whether a text is an IPv4 address, or a name that the domain name system could hold (RFC 1123, 2.1)."""
    labels = text.split(".")
    # No top-level domain is a number, so that `300.1.2.3` is a mistyped address and not a name.
    if labels[-1].isdigit():
        return _is_ipv4(text)
    if len(text) > _MAX_NAME_LENGTH:
        return False
    return all(_LABEL.fullmatch(label) for label in labels)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def split_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`.

    Raises:
        ValueError: the host could not exist, or the port is not from 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    if not is_host(host):
        raise ValueError("no such host can exist")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= _MAX_PORT:
        raise ValueError("a port is a number from 1 to 65535")
    return host, int(port)


def _check_host(text: str) -> str:
    if not is_host(text):
        raise ValueError("no such host can exist")
    return text


def _check_address(text: str) -> str:
    split_address(text)
    return text


# Bounded before it is examined, since both are read from files that came from elsewhere.
HostName = Annotated[
    str, StringConstraints(max_length=_MAX_NAME_LENGTH), AfterValidator(_check_host)
]
HostAndPort = Annotated[
    str, StringConstraints(max_length=_MAX_NAME_LENGTH + 6), AfterValidator(_check_address)
]
