"""Lets a server on loopback answer its own user and nobody else on the machine.

Flower's servers listen on TCP, where every user of a machine can connect. The attack: another user of the machine
fetches messages that are meant for the silo, or answers in its name. This ASGI middleware is in front of such a server
and looks up in the kernel which user each connection belongs to, before a byte of a request's body is read.
"""

import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from ddm.system.peers import user_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LENGTH = re.compile(rb"[0-9]{1,9}")


class OwnUserMiddleware:
    """Answers 403 to a connection that is not with a process of this process's own user on this machine.

    Only Linux says which user a connection belongs to; elsewhere everybody is answered.

    Args:
        app: the server.
        open_to_all: patterns of paths that anybody may post to, each with the most bytes of a body; the first one that
            matches counts. None by default.
    """

    def __init__(self, app: App, open_to_all: Mapping[str, int] | None = None) -> None:
        self._app = app
        self._open = [
            (re.compile(pattern), max_bytes) for pattern, max_bytes in (open_to_all or {}).items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # An open path first: the kernel takes longer to answer the more connections strangers hold.
        if scope["type"] == "lifespan" or self._is_open(scope) or self._is_own(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send(
                {
                    "type": "http.response.start",
                    "status": 403,
                    "headers": [(b"connection", b"close")],
                }
            )
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close"})

    def _is_own(self, scope: Scope) -> bool:
        if sys.platform != "linux":
            return True
        # uvicorn believes a request from loopback that states another address of its client, with any port.
        if any(name == b"x-forwarded-for" for name, _ in scope.get("headers", ())):
            return False
        client = scope.get("client")
        server = scope.get("server")
        # Without both addresses the connection cannot be looked up; nobody is let in on trust.
        if not client or not server or server[1] is None:
            return False
        return user_of(tuple(client), tuple(server)) == os.geteuid()

    def _is_open(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        # The server reads a whole body before it checks who sent it, so that one of unknown length could fill memory.
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
            return False
        for pattern, max_bytes in self._open:
            if pattern.fullmatch(scope["path"]):
                return int(lengths[0]) <= max_bytes
        return False
