"""What a site's SuperNode takes from the aggregator's SuperLink, and what it sends back.

Flower's connection carries messages, but also an application, a description of the run that names the application's
folder, and the texts of exceptions. Here messages alone pass: the application is the courier's own, whatever the
SuperLink says, and an exception's text stays at the site.
"""

import copy
import hashlib
import io
import logging
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import Error, Message, MessageType
from flwr.app.message.message import make_message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.run import Run

from ddm.transport.flower import has_few_objects

_PUBLISHER = "archipelago"
_NAME = "courier"
_VERSION = "0.1.0"
# The application is settings alone. Flower wants a server's part to be named as well; no silo ever looks for it.
_SETTINGS = f"""
[project]
name = "{_NAME}"
version = "{_VERSION}"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "{_PUBLISHER}"

[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "silo.client_app:app"
"""
# As Flower makes them.
_OBJECT_ID = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[\w.:-]{0,128}", re.ASCII)
_log = logging.getLogger("flwr")


def own_application() -> Fab:
    """Pack the one application that a site runs; the same bytes every time."""
    settings = _SETTINGS.encode()
    digest = hashlib.sha256(settings).hexdigest()
    files = {
        "pyproject.toml": settings,
        # Flower's list of the files: name, digest and size in bits.
        ".info/CONTENT": f"pyproject.toml,{digest},{8 * len(settings)}".encode(),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for name, data in files.items():
            # Without the time of packing, which would change the archive's digest.
            opened.writestr(zipfile.ZipInfo(name), data)
    content = archive.getvalue()
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


def guard_connection(connect: Callable[..., Any]) -> Callable[..., Any]:
    """Let Flower's connection to the SuperLink carry messages, and nothing that decides what a site runs or tells.

    The attacks: a SuperLink ships code, names a folder that it filled before as the application's, writes into the log
    that the courier reads, or asks for something that fails, so that the exception's text tells it a path.
    """
    application = own_application()

    def describe_run(run_id: int) -> Run:
        run = Run.create_empty(run_id)
        run.fab_id = f"{_PUBLISHER}/{_NAME}"
        run.fab_version = _VERSION
        run.fab_hash = application.hash_str
        # Flower stores one context for each series.
        run.series_id = run_id
        return run

    def give_application(digest: str, run_id: int) -> Fab:
        return application

    @contextmanager
    def connect_guarded(*arguments: object, **settings: object) -> Iterator[tuple[object, ...]]:
        with connect(*arguments, **settings) as connection:
            node_id, receive, send, _, _, pull_object, push_object, confirm = connection

            def receive_plain() -> tuple[Message, ObjectTree] | None:
                received: tuple[Message, ObjectTree] | None = receive()
                if received is None or _is_plain(*received):
                    return received
                _log.error("A message of another form than a request's was left unanswered.")
                return None

            def send_without_reason(
                message: Message, tree: ObjectTree, runtime_s: float
            ) -> tuple[set[str], str]:
                if not message.has_error():
                    sent: tuple[set[str], str] = send(message, tree, runtime_s)
                    return sent
                bare = _without_reason(message)
                wanted, session_id = send(bare, get_object_tree(bare), runtime_s)
                # Flower would look for its content among the objects of the message that it replaces.
                for object_id in wanted:
                    push_object(bare.metadata.run_id, session_id, object_id, bare.deflate())
                return set(), session_id

            yield (
                node_id,
                receive_plain,
                send_without_reason,
                describe_run,
                give_application,
                pull_object,
                push_object,
                confirm,
            )

    return connect_guarded


def _is_plain(message: Message, tree: ObjectTree) -> bool:
    """Whether a message is a request with plain identifiers, and its objects are few and all its own.

    Flower waits for ever for the answer to a message that it cannot put together.
    """
    metadata = message.metadata
    return (
        _OBJECT_ID.fullmatch(metadata.message_id) is not None
        and metadata.message_id == tree.object_id
        and _PLAIN.fullmatch(metadata.group_id) is not None
        and metadata.message_type == MessageType.QUERY
        and metadata.reply_to_message_id == ""
        and has_few_objects(tree)
    )


def _without_reason(message: Message) -> Message:
    """Return an error message with Flower's code alone: its reason is the text of an exception."""
    bare = make_message(copy.deepcopy(message.metadata), error=Error(message.error.code))
    bare.metadata.__dict__["_message_id"] = bare.object_id
    return bare


def keep_beating(beat: Callable[[], bool]) -> Callable[[], bool]:
    """Let a heartbeat that fails, however it fails, count as missed, so that Flower tries again.

    Flower otherwise ends the thread that sends them, and the SuperLink counts the node as away from then on.
    """

    def beat_or_miss() -> bool:
        try:
            return beat()
        except Exception as error:
            _log.warning("a heartbeat failed: %s", type(error).__name__)
            return False

    return beat_or_miss


def close_clients(start: Callable[..., None]) -> Callable[..., None]:
    """Close every HTTP client as Flower starts it; see `close_client`."""

    def start_closed(client: ProtobufClient, *arguments: object, **settings: object) -> None:
        start(client, *arguments, **settings)
        close_client(client)

    return start_closed


def close_client(client: ProtobufClient) -> None:
    """Let an HTTP client of Flower's reach its own server alone, and take bodies only as they are.

    The attacks: a SuperLink redirects the courier to another machine of the hospital's network, or sends a few hundred
    bytes that unpack to gigabytes.
    """
    http = client._client
    http.follow_redirects = False
    http.headers["accept-encoding"] = "identity"
    http.event_hooks = {"response": [_refuse_encoded]}


def _refuse_encoded(response: httpx.Response) -> None:
    """Refuse a body in an encoding, before it is read."""
    if response.headers.get("content-encoding", "identity") != "identity":
        # What Flower meets with another attempt, later and later.
        raise httpx.RemoteProtocolError("a body in an encoding that was not asked for")
