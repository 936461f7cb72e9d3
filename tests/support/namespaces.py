"""Hosts in network namespaces of their own, joined by a switch: what one hears of another comes over its cable."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

AVAILABLE = os.geteuid() == 0 and shutil.which("ip") is not None


class Switch:
    """A bridge in a namespace of its own, and a host at the other end of each cable.

    Args:
        addresses: of each host, in one /24.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.addresses = dict(addresses)
        self._names = {host: f"arch{os.getpid()}{host}" for host in ("switch", *addresses)}

    def create_hosts(self) -> None:
        """Make the hosts, and plug them in."""
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        switch = self._names["switch"]
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, (host, address) in enumerate(self.addresses.items()):
            name = self._names[host]
            port = f"port{number}"
            _ip(
                "link",
                "add",
                "cable0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            _ip("-n", name, "link", "set", "cable0", "up")

    def remove(self) -> None:
        """Take everything away; a cable goes with its ends."""
        for name in self._names.values():
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def command_prefix(self, host: str) -> list[str]:
        """Return the words that a command begins with to run on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def reachable_addresses(self, host: str) -> list[str]:
        """Return every address of a host that the others may try."""
        links: list[dict[str, Any]] = json.loads(
            _ip("-j", "-n", self._names[host], "address", "show", "dev", "cable0")
        )
        addresses = []
        for link in links:
            for entry in link.get("addr_info", []):
                # A link-local address means nothing without the interface to ask through.
                suffix = "%cable0" if entry["scope"] == "link" else ""
                addresses.append(entry["local"] + suffix)
        return addresses

    def sockets(self, host: str, kind: str) -> list[str]:
        """The local ends of a host's listening (TCP) or open (UDP) sockets that are not bound to loopback."""
        option = {"tcp": "-Hlnt", "udp": "-Hanu"}[kind]
        result = subprocess.run(
            [*self.command_prefix(host), "ss", option], check=True, capture_output=True, text=True
        )
        local = [line.split()[3] for line in result.stdout.splitlines()]
        return [end for end in local if not end.startswith(("127.", "[::1]", "[::ffff:127."))]


@contextmanager
def network_switch(addresses: Mapping[str, str]) -> Iterator[Switch]:
    """Such hosts, which are gone afterwards."""
    switch = Switch(addresses)
    try:
        switch.create_hosts()
        yield switch
    finally:
        switch.remove()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
