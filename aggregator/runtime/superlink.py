"""The program that runs the aggregator's Flower SuperLink, closed to the other users of its machine.

    python -P aggregator/runtime/superlink.py ARGUMENTS-OF-FLOWER-SUPERLINK...

On one port Flower serves silos, people who submit code, and its own programs; behind nginx, strangers on the network
reach the first only. On loopback other users would reach all three, and submitted code runs as the user of `aggregator
run`. So this server looks up in the kernel's tables whose each connection is; only silos' requests, which Flower
authenticates by their nodes' keys, are answered regardless of who sends them. What a node pushes must be its own reply
to a message that was sent to it.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.middleware import Middleware

from ddm.errors import SetupError
from ddm.transport.flower import has_few_objects
from ddm.transport.flower_log import keep_lines_plain
from ddm.transport.own_user import OwnUserMiddleware

# The paths that nginx lets through.
FLEET = r"/v1/fleet/[a-z-]{1,40}"
# More than the silos of a federation get requests while one of these may still be answered.
_MAX_REMEMBERED = 100_000


def require_name(owner: ModuleType, name: str) -> None:
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


def take_replies_only(push: Callable[..., Any]) -> Callable[..., Any]:
    """Let a node push its own replies, and nothing else.

    The attacks: a node fills the disk with messages that nobody asked for, or with the same reply again after it was
    fetched, or sends another silo a message as if the SuperLink had. Flower itself then compares a reply with the
    message that it answers.
    """
    # Of replies that were stored; an ordered set.
    answered: dict[str, None] = {}
    # The server answers requests in several threads.
    lock = threading.Lock()

    def push_checked(request: PushMessagesRequest, state: object) -> PushMessagesResponse:
        with lock:
            if not _is_own_reply(request) or _answered_id(request) in answered:
                raise FlowerError(
                    ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED,
                    f"SuperNode {request.node.node_id} pushed something else than one new reply of its own",
                )
            answer: PushMessagesResponse = push(request, state)
            if answer.objects_to_push:
                answered[_answered_id(request)] = None
                if len(answered) > _MAX_REMEMBERED:
                    del answered[next(iter(answered))]
            return answer

    return push_checked


def _answered_id(request: PushMessagesRequest) -> str:
    return str(request.messages_list[0].metadata.reply_to_message_id)


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
        return Middleware(OwnUserMiddleware, open_to_all=FLEET), *get_middleware()

    extensions.get_middleware = get_middleware_after_ours


if __name__ == "__main__":
    # The database and what Flower keeps beside it are for this user alone.
    os.umask(0o077)
    keep_lines_plain()
    close_port()
    require_name(fleet_handlers, "push_messages")
    fleet_handlers.push_messages = take_replies_only(fleet_handlers.push_messages)
    sys.argv[0] = "flower-superlink"
    flower_superlink()
