"""The program that runs the aggregator's Flower SuperLink, closed to the other users of its machine.

    python -P aggregator/runtime/superlink.py ARGUMENTS-OF-FLOWER-SUPERLINK...

On one port Flower serves silos, people who submit code, and its own programs; behind nginx, strangers on the network
reach the first only. On loopback other users would reach all three, and submitted code runs as the user of `aggregator
run`. So this server looks up in the kernel's tables whose each connection is; only silos' requests, which Flower
authenticates by their nodes' keys, are answered regardless of who sends them. What a node pushes must be its own reply
to a message that was sent to it, and what the store holds for each node is bounded.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from starlette.middleware import Middleware

from aggregator.runtime.proxy import Limits
from aggregator.transfer.dispatcher import MAX_IN_FLIGHT
from ddm.errors import SetupError
from ddm.transport.flower import has_few_objects
from ddm.transport.flower_log import keep_lines_plain
from ddm.transport.own_user import OwnUserMiddleware

# The paths that nginx lets through, and how long a body it lets through.
OPEN_PATHS = {
    r"/v1/fleet/push-object": Limits.object_bytes,
    r"/v1/fleet/[a-z-]{1,40}": Limits.body_bytes,
}
# Of one node: those that the ServerApp waits for, those that it gave up just now, and as many again.
MAX_EXCHANGES = 3 * MAX_IN_FLIGHT
# A reply has at most 160 MiB of data; its document and the heads of its records are smaller than the difference.
MAX_REPLY_BYTES = 168 * 1024 * 1024
_MAX_ATTEMPTS = 3


def require_name(owner: ModuleType | type, name: str) -> None:
    """Require that Flower has what is about to be replaced.

    Raises:
        SetupError: this version of Flower has nothing of this name, so that ours would never be called.
    """
    if not hasattr(owner, name):
        raise SetupError(
            "flwr",
            expected=f"{owner.__name__}.{name}",
            got="another version",
            remedy="Install the versions of constraints.txt.",
        )


@dataclass
class _Exchange:
    """A request of the aggregator, and the node's reply to it; each is named by the root of its objects.

    Attributes:
        request_id: the request.
        reply_id: the reply; empty before the node pushed one.
        session_id: the session in which Flower takes the reply's objects.
        num_attempts: how often the node pushed a reply.
        num_bytes: of the reply's objects, so far.
    """

    request_id: str
    reply_id: str = ""
    session_id: str = ""
    num_attempts: int = 0
    num_bytes: int = 0


class Exchanges:
    """Bounds what Flower's store holds for each node: a few requests to it, and its replies to them.

    Flower deletes a message when it was fetched, and everything else when the run ends, which takes weeks. The attacks:
    a node fills the disk with messages that nobody asked for, with replies that nobody fetches any more, since its
    SuperNode connected again meanwhile, or with requests that it never takes. Or it sends another silo a message as if
    the SuperLink had. So the oldest exchange is removed when a new request comes. Nothing is lost with it: the
    ServerApp has no more than `MAX_IN_FLIGHT` requests that it still waits for.

    The methods take one of Flower's handlers each, and return what replaces it.
    """

    def __init__(self) -> None:
        # Node id to its exchanges by request id, oldest first.
        self._of_node: dict[int, dict[str, _Exchange]] = {}
        # The server answers requests in several threads. No reply is stored while its exchange is removed.
        self._lock = threading.Lock()

    def record_requests(self, push: Callable[..., Any]) -> Callable[..., Any]:
        """Record what the ServerApp pushes, and remove the oldest exchanges of the nodes that it is for."""

        def push_recorded(
            request: PushAppMessagesRequest, state: Any, task: Any
        ) -> PushAppMessagesResponse:
            answer: PushAppMessagesResponse = push(request, state, task)
            with self._lock:
                for message, message_id in zip(
                    request.messages_list, answer.message_ids, strict=True
                ):
                    # Flower answers with an empty id where it refuses a message.
                    if message_id:
                        self._record(message.metadata.dst_node_id, message_id, state)
            return answer

        return push_recorded

    def take_replies_only(self, push: Callable[..., Any]) -> Callable[..., Any]:
        """Let a node push one reply of its own to each request, and nothing else.

        Flower itself then compares a reply with the message that it answers.
        """

        def push_checked(request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
            if not _is_own_reply(request):
                raise _refusal(
                    request.node.node_id, "pushed something else than a reply of its own"
                )
            metadata = request.messages_list[0].metadata
            with self._lock:
                exchanges = self._of_node.get(request.node.node_id, {})
                exchange = exchanges.get(metadata.reply_to_message_id)
                # A late reply. Flower's answer would be the same, after a new session that nobody closes.
                if exchange is None:
                    return PushMessagesResponse()
                # A push that fails, as while the database is busy, may be repeated.
                if exchange.reply_id or exchange.num_attempts == _MAX_ATTEMPTS:
                    raise _refusal(request.node.node_id, "pushed another reply to the same request")
                # Ours are all new, since each reply has a salt. Objects of two replies would outlive the first of them.
                tree = request.message_object_trees[0]
                if any(part.object_id in state.object_store for part in iterate_object_tree(tree)):
                    raise _refusal(request.node.node_id, "named an object that is there already")
                exchange.num_attempts += 1
                answer: PushMessagesResponse = push(request, state)
                exchange.reply_id = metadata.message_id
                exchange.session_id = answer.session_id
                return answer

        return push_checked

    def limit_objects(self, push: Callable[..., Any]) -> Callable[..., Any]:
        """Let a node push the objects of its own replies, as many bytes of each as the ServerApp would accept."""

        def push_limited(request: PushObjectRequest, state: Any) -> PushObjectResponse:
            num_bytes = len(request.object_content)
            with self._lock:
                exchange = self._of_session(request.node.node_id, request.session_id)
                if exchange is None:
                    return PushObjectResponse(stored=False)
                if exchange.num_bytes + num_bytes > MAX_REPLY_BYTES:
                    raise _refusal(request.node.node_id, "pushed more than fits into a reply")
                # Counted before it is stored, since several may be on their way.
                exchange.num_bytes += num_bytes
            is_stored = False
            try:
                answer: PushObjectResponse = push(request, state)
                is_stored = answer.stored
            finally:
                if not is_stored:
                    with self._lock:
                        exchange.num_bytes -= num_bytes
            return answer

        return push_limited

    def _record(self, node_id: int, request_id: str, state: Any) -> None:
        exchanges = self._of_node.setdefault(node_id, {})
        # The ServerApp repeats a push whose answer was lost.
        exchanges.setdefault(request_id, _Exchange(request_id))
        while len(exchanges) > MAX_EXCHANGES:
            oldest = exchanges.pop(next(iter(exchanges)))
            _remove(oldest, state)

    def _of_session(self, node_id: int, session_id: str) -> _Exchange | None:
        # Without a session's id Flower would look for any session that waits for the object.
        if not session_id:
            return None
        for exchange in self._of_node.get(node_id, {}).values():
            if exchange.session_id == session_id:
                return exchange
        return None


def _remove(exchange: _Exchange, state: Any) -> None:
    """Remove what Flower still holds of an exchange: nothing, where the reply was fetched."""
    if exchange.session_id:
        # Flower has no other way to close a session before all its objects are there.
        state._cleanup_push_session(exchange.session_id, cleanup_messages=False)
    state.delete_messages({exchange.request_id})
    for root_id in (exchange.request_id, exchange.reply_id):
        if root_id and root_id in state.object_store:
            state.object_store.delete(root_id)


def _refusal(node_id: int, reason: str) -> FlowerError:
    return FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"SuperNode {node_id} {reason}")


def _is_own_reply(request: PushMessagesRequest) -> bool:
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return False
    metadata = request.messages_list[0].metadata
    tree = request.message_object_trees[0]
    return (
        metadata.src_node_id == request.node.node_id
        and metadata.reply_to_message_id != ""
        and metadata.message_id == tree.object_id
        and has_few_objects(tree)
        # How long an application took: Flower adds it up.
        and all(0 <= runtime_s < math.inf for runtime_s in request.clientapp_runtime_list)
    )


def close_port() -> None:
    """Let Flower put our check before everything else that its server does.

    Raises:
        SetupError: this version of Flower has no place for it.
    """
    require_name(extensions, "get_middleware")
    get_middleware = extensions.get_middleware

    def get_middleware_after_ours() -> tuple[Middleware, ...]:
        return Middleware(OwnUserMiddleware, open_to_all=OPEN_PATHS), *get_middleware()

    extensions.get_middleware = get_middleware_after_ours


def remove_old_messages(state: Any) -> None:
    """Remove the messages of all runs, at the start: what is not fetched then is sent again."""
    for run in state.get_run_info():
        state.cleanup_run(run.run_id)


def bound_store() -> None:
    """Let Flower's store hold a few exchanges for each node, and none from before this start.

    Raises:
        SetupError: this version of Flower does not have the handlers that are replaced.
    """
    for owner, name in (
        (runtime_handlers, "push_messages"),
        (fleet_handlers, "push_messages"),
        (fleet_handlers, "push_object"),
        (SqlLinkState, "_cleanup_push_session"),
        (extensions, "configure_app"),
    ):
        require_name(owner, name)
    exchanges = Exchanges()
    runtime_handlers.push_messages = exchanges.record_requests(runtime_handlers.push_messages)
    fleet_handlers.push_messages = exchanges.take_replies_only(fleet_handlers.push_messages)
    fleet_handlers.push_object = exchanges.limit_objects(fleet_handlers.push_object)
    configure_app = extensions.configure_app

    def configure_and_clean(app: FastAPI) -> None:
        configure_app(app)
        remove_old_messages(app.state.linkstate_factory.state())

    extensions.configure_app = configure_and_clean


if __name__ == "__main__":
    # The database and what Flower keeps beside it are for this user alone.
    os.umask(0o077)
    keep_lines_plain()
    close_port()
    bound_store()
    sys.argv[0] = "flower-superlink"
    flower_superlink()
