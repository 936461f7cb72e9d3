"""The guarded connection to the SuperLink: whatever it sends, one application runs, and no exception's text leaves."""

import gzip
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import Error, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.cli.install import install_from_fab
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_fused_config_from_fab, get_project_dir
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.run import Run
from flwr.supernode.fleet_http_client import FleetHttpClient

import silo.client_app
from silo.courier import connection

SECRET = "[Errno 28] No space left on device: '/srv/north/MUELLER'"


def message(*, group_id: str = "", error: Error | None = None) -> Message:
    """Make a message as the SuperLink would send it."""
    metadata = Metadata(
        run_id=7,
        message_id="a" * 64,
        src_node_id=1,
        dst_node_id=2,
        reply_to_message_id="",
        group_id=group_id,
        created_at=1.0,
        ttl=60.0,
        message_type="query",
    )
    content = None if error else RecordDict()
    return make_message(metadata, content, error)


class SuperLink:
    """A SuperLink's end of the connection: hostile, and it records what it is sent."""

    def __init__(self, received: Message | None = None) -> None:
        self.received = received
        self.tree = ObjectTree(object_id="a" * 64)
        self.sent: list[Message] = []
        self.pushed: dict[str, bytes] = {}

    @contextmanager
    def connect(self) -> Iterator[tuple[object, ...]]:
        yield (
            42,
            lambda: self.received and (self.received, self.tree),
            self._send,
            self._describe_run,
            lambda digest, run_id: Fab(digest, b"code of the SuperLink", {}),
            "pull_object",
            self._push,
            "confirm",
        )

    def _describe_run(self, run_id: int) -> Run:
        run = Run.create_empty(run_id)
        run.fab_id = "archipelago/archipelago"
        run.fab_version = "0.1.0.12345678/../../../evil"
        run.override_config = {"plan-id": "evil"}
        return run

    def _send(self, sent: Message, tree: ObjectTree, runtime_s: float) -> tuple[set[str], str]:
        self.sent.append(sent)
        return {tree.object_id}, "session"

    def _push(self, run_id: int, session_id: str, object_id: str, content: bytes) -> None:
        self.pushed[object_id] = content


def guarded(superlink: SuperLink) -> Any:
    return connection.guard_connection(superlink.connect)()


def test_supernode_runs_the_package_s_own_application_whatever_the_superlink_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    # The attack: files that the courier stored before anything verified, named as the application's folder.
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "pyproject.toml").write_text('clientapp = "evil:app"')
    with guarded(SuperLink()) as (node_id, _, _, get_run, get_fab, *_):
        run = get_run(7)
        fab = get_fab("f" * 64, 7)
    assert (node_id, run.run_id, run.fab_hash) == (42, 7, fab.hash_str)
    assert get_fused_config_from_fab(fab.content, run) == {}
    # From here on as Flower does for every message.
    installed = install_from_fab(fab.content, skip_prompt=True)
    assert installed == get_project_dir(run.fab_id, run.fab_version, fab.hash_str)
    assert [path.name for path in installed.iterdir()] == ["pyproject.toml"]
    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load(run.fab_id, run.fab_version, fab.hash_str) is silo.client_app.app
    assert connection.own_application() == fab
    shutil.rmtree(installed)


def test_reply_with_an_error_leaves_with_its_code_alone() -> None:
    superlink = SuperLink()
    failed = message(error=Error(8, SECRET))
    with guarded(superlink) as (_, _, send, *_):
        assert send(failed, get_object_tree(failed), 1.0) == (set(), "session")
    (sent,) = superlink.sent
    assert (sent.error.code, sent.error.reason) == (8, None)
    assert sent.metadata.run_id == 7
    # Flower names an object by its content.
    assert superlink.pushed == {sent.object_id: sent.deflate()}
    assert sent.metadata.message_id == sent.object_id
    assert b"MUELLER" not in sent.deflate()
    assert failed.error.reason == SECRET


def test_reply_without_an_error_leaves_as_it_is() -> None:
    superlink = SuperLink()
    reply = message()
    tree = get_object_tree(reply)
    with guarded(superlink) as (_, _, send, *_):
        assert send(reply, tree, 1.0) == ({tree.object_id}, "session")
    assert superlink.sent == [reply]
    assert not superlink.pushed


@pytest.mark.parametrize(
    ("group_id", "is_taken"),
    [
        ("", True),
        ("round-1", True),
        ("1]\nINFO : SuperNode ID: 1234", False),
        ("\x1b]0;owned\x07", False),
        ("g" * 129, False),
    ],
)
def test_message_whose_identifiers_are_not_plain_is_left_unanswered(
    group_id: str, *, is_taken: bool
) -> None:
    with guarded(SuperLink(message(group_id=group_id))) as (_, receive, *_):
        assert (receive() is not None) == is_taken
    with guarded(SuperLink()) as (_, receive, *_):
        assert receive() is None


def with_metadata(**changes: str) -> Message:
    received = message()
    for name, value in changes.items():
        received.metadata.__dict__[f"_{name}"] = value
    return received


@pytest.mark.parametrize(
    "received",
    [
        with_metadata(message_id=""),
        with_metadata(message_id="b" * 64),
        with_metadata(message_type="train"),
        with_metadata(message_type="x\nReceiving: a message"),
        with_metadata(reply_to_message_id="c" * 64),
    ],
)
def test_message_that_flower_could_not_put_together_is_left_unanswered(received: Message) -> None:
    """Flower would wait for ever for the answer of a program that never learned what to answer."""
    with guarded(SuperLink(received)) as (_, receive, *_):
        assert receive() is None


@pytest.mark.parametrize(("num_objects", "is_taken"), [(64, True), (65, False)])
def test_message_of_many_objects_is_left_unanswered(num_objects: int, *, is_taken: bool) -> None:
    superlink = SuperLink(message())
    children = [ObjectTree(object_id=f"{number:064x}") for number in range(num_objects - 1)]
    superlink.tree = ObjectTree(object_id="a" * 64, children=children)
    with guarded(superlink) as (_, receive, *_):
        assert (receive() is not None) == is_taken


def test_heartbeat_that_fails_in_whatever_way_is_sent_again() -> None:
    answers: Iterator[bool | Exception] = iter(
        [RuntimeError("not recognised"), ValueError("no protobuf"), True]
    )

    def beat() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    beats = connection.keep_beating(beat)
    assert [beats(), beats(), beats()] == [False, False, True]


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """Serve on loopback; yields the address, and the paths that were asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            answer(self)

        def do_GET(self) -> None:
            paths.append(self.path)
            answer(self)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pull(address: str) -> PullMessagesResponse:
    """Ask for messages as a SuperNode does, with a client that was closed as the courier closes them."""
    with FleetHttpClient.from_server_address(address, True, None, interceptors=[]) as client:
        connection.close_client(client)
        answer: PullMessagesResponse = client.PullMessages(PullMessagesRequest())
        return answer


def test_superlink_cannot_send_the_courier_to_another_machine() -> None:
    with serving(lambda request: request.send_error(404)) as (inside, paths_inside):

        def redirect(request: BaseHTTPRequestHandler) -> None:
            request.send_response(307)
            request.send_header("Location", f"http://{inside}/admin/reboot")
            request.send_header("Content-Length", "0")
            request.end_headers()

        with serving(redirect) as (address, paths), pytest.raises(httpx.HTTPStatusError):
            pull(address)
    assert len(paths) == 1
    assert not paths_inside


@pytest.mark.parametrize("encoding", [None, "gzip", "deflate, gzip"])
def test_body_in_an_encoding_is_refused_before_it_is_unpacked(encoding: str | None) -> None:
    asked: list[str | None] = []

    def send(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Accept-Encoding"])
        body = b""
        if encoding is not None:
            body = gzip.compress(bytes(2**20))
        request.send_response(200)
        if encoding is not None:
            request.send_header("Content-Encoding", encoding)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with serving(send) as (address, _):
        if encoding is None:
            assert pull(address) == PullMessagesResponse()
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                pull(address)
    assert asked == ["identity"]


def test_every_client_that_flower_starts_is_closed() -> None:
    class Client(FleetHttpClient):
        pass

    Client.__init__ = connection.close_clients(FleetHttpClient.__init__)  # type: ignore[method-assign]
    with Client.from_server_address("127.0.0.1:1", True, None, interceptors=[]) as client:
        assert not client._client.follow_redirects
