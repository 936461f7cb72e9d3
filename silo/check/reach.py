"""Tries a TLS connection to the aggregator, directly or through the proxy that Flower's gRPC would take."""

import base64
import http.client
import os
import ssl
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

_TIMEOUT_S = 5.0
_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # in the order in which gRPC takes them


def proxy_for(host: str) -> SplitResult | None:
    """Return the proxy for a host, from the environment; None for a direct connection."""
    for name in _VARIABLES:
        if value := os.environ.get(name):
            without = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112 - as gRPC does
            suffixes = (each.strip().lstrip(".") for each in without.split(","))
            direct = any(each and (host == each or host.endswith(f".{each}")) for each in suffixes)
            return None if direct else urlsplit(value)
    return None


def shown(proxy: SplitResult | None) -> str | None:
    """Return a proxy's host and port, without user and password."""
    return f"{proxy.hostname}:{proxy.port or 80}" if proxy else None


def try_connection(address: str, ca: Path) -> str | None:
    """Connect, check the certificate, and send nothing.

    Args:
        address: ``host:port``.
        ca: the certificate that signs the aggregator's.

    Returns:
        Why no connection came about; None if one did.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    proxy = proxy_for(host)
    try:
        context = ssl.create_default_context(cafile=str(ca))
        if proxy and proxy.hostname:
            link = http.client.HTTPSConnection(proxy.hostname, proxy.port or 80, timeout=_TIMEOUT_S, context=context)
            link.set_tunnel(host, int(port), headers=_credentials(proxy))
        else:
            link = http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT_S, context=context)
        try:
            link.connect()
        finally:
            link.close()
    except ssl.SSLCertVerificationError as error:
        return f"a certificate that does not verify: {error.verify_message}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
    return None


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
