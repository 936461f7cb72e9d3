"""Finds how this machine reaches the aggregator, directly or through a proxy, and why it does not.

The proxy is the one that Flower's client takes from the environment: `https_proxy`, else `all_proxy`, either in capital
letters too, unless `no_proxy` names the host.
"""

import base64
import http.client
import ipaddress
import re
import ssl
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies_environment

_TIMEOUT_S = 5.0
_STATUS = re.compile(r"Tunnel connection failed: (\d{3})")
_PASSWORD = "Put the right user and password into https_proxy, as http://USER:PASSWORD@HOST:PORT with %40 for an @."
_PROXY_REMEDIES = {
    "407": _PASSWORD,
    "401": _PASSWORD,  # as tinyproxy answers
    "403": "Ask who runs the proxy to let this machine CONNECT to that host and port.",
}
_REMEDY = (
    "Ask whether `aggregator run` is running there, and allow connections to this host and port "
    "in the site's firewall."
)


def proxy_for(host: str) -> SplitResult | None:
    """Return the proxy for a host, from the environment; None for a direct connection."""
    # As Flower's client reads them, or the check would test another way than the courier takes.
    variables = getproxies_environment()
    proxy = variables.get("https") or variables.get("all")
    if not proxy:
        return None
    for pattern in variables.get("no", "").split(","):
        if _matches(host, pattern.strip()):
            return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    return urlsplit(proxy)


def _matches(host: str, pattern: str) -> bool:
    """Whether an entry of `no_proxy` names a host: itself, or a domain that it is in."""
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address(pattern.strip("[]"))
    except ValueError:
        pass
    if pattern == "*":
        return True
    domain = pattern.lstrip(".").lower()
    if not domain:
        return False
    return host.lower() == domain or host.lower().endswith(f".{domain}")


def without_password(proxy: SplitResult | None) -> str | None:
    """Return a proxy's host and port, without user and password, which must not be in a log."""
    if proxy is None:
        return None
    return f"{proxy.hostname}:{_port(proxy)}"


def make_connection(
    address: str, context: ssl.SSLContext, timeout_s: float = _TIMEOUT_S
) -> http.client.HTTPSConnection:
    """Return a connection to an aggregator that is not opened yet, directly or through the proxy.

    Args:
        address: ``host:port``.
        context: how certificates are checked.
        timeout_s: seconds that each step may take.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    proxy = proxy_for(host)
    if not proxy or not proxy.hostname:
        return http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=context)
    connection = http.client.HTTPSConnection(
        proxy.hostname, _port(proxy), timeout=timeout_s, context=context
    )
    # CONNECT: the proxy sees the aggregator's address, and nothing of what is sent through it.
    connection.set_tunnel(host, int(port), headers=_credentials(proxy))
    return connection


def try_connection(address: str, ca: Path) -> str | None:
    """Connect, check the certificate, and send nothing.

    Args:
        address: ``host:port``.
        ca: the certificate that signs the aggregator's.

    Returns:
        Why no connection came about; None if one did.
    """
    try:
        connection = make_connection(address, ssl.create_default_context(cafile=str(ca)))
        try:
            # A TLS handshake, and no request: an operator may run this as often as they like.
            connection.connect()
        finally:
            connection.close()
    except ssl.SSLCertVerificationError as error:
        return f"a certificate that does not verify: {error.verify_message}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return str(reason)[:200] or type(error).__name__
    return None


def remedy_for(reason: str, proxy: str | None) -> str:
    """Say what to do where `try_connection` gave a reason.

    Args:
        reason: that reason.
        proxy: through which it tried, as `without_password` returns it.
    """
    if proxy is None:
        return f"{_REMEDY} Where the site has a proxy, name it in https_proxy."
    match = _STATUS.search(reason)
    if match is None:
        return f"Ask whether the proxy {proxy} is running, or correct or unset https_proxy."
    status = match[1]
    if status in _PROXY_REMEDIES:
        return _PROXY_REMEDIES[status]
    return _REMEDY.replace("the site's firewall", f"the proxy {proxy}")


def explain(address: str, ca: Path) -> str | None:
    """Explain in a few sentences why there is no connection, and what to do; None where there would be one now."""
    host, _, _ = address.rpartition(":")
    proxy = without_password(proxy_for(host.strip("[]")))
    reason = try_connection(address, ca)
    if reason is None:
        return None
    through = f" through the proxy {proxy}" if proxy else ""
    return f"the aggregator cannot be reached{through}: {reason}. {remedy_for(reason, proxy)}"


def _port(proxy: SplitResult) -> int:
    try:
        # Raises for a port that is not a number.
        return proxy.port or 80
    except ValueError:
        return 80


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    encoded = base64.b64encode(pair.encode()).decode()
    return {"Proxy-Authorization": f"Basic {encoded}"}
