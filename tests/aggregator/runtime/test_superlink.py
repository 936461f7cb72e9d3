"""What a node may push to the SuperLink, and what the store holds for it: Flower's own state and handlers, and ours."""

import secrets
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from aggregator.runtime import superlink
from aggregator.server_app import FlowerCarrier
from aggregator.transfer.dispatcher import Node as TransferNode
from ddm.errors import SetupError, TransportError
from ddm.transport.flower import MAX_OBJECTS
from ddm.transport.messages import Envelope, Status, StatusQuery
from tests.support.errors import has_subject

# Flower's own use of Alembic.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
SUPERLINK = 1  # Flower's number for it


@dataclass
class World:
    """A SuperLink's state with a run at work, and two nodes."""

    state: Any
    database: str
    run_id: int
    north: int
    south: int
    exchanges: superlink.Exchanges

    def push(self, request: PushMessagesRequest) -> list[str]:
        """Push as a node does; returns the objects that the SuperLink wants to have."""
        checked = self.exchanges.take_replies_only(fleet_handlers.push_messages)
        return list(checked(request, self.state).objects_to_push)

    def push_object(
        self, node_id: int, session_id: str, object_id: str, content: bytes = b""
    ) -> bool:
        """Push an object of a reply as a node does; returns whether it is stored."""
        limited = self.exchanges.limit_objects(fleet_handlers.push_object)
        request = PushObjectRequest(
            node=Node(node_id=node_id),
            run_id=self.run_id,
            session_id=session_id,
            object_id=object_id,
            object_content=content,
        )
        return bool(limited(request, self.state).stored)

    def ask(self, node_id: int) -> Message:
        """Send a node a message as the ServerApp does."""
        message = self.message(SUPERLINK, node_id)
        request = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        record = self.exchanges.record_requests(runtime_handlers.push_messages)
        answer = record(request, self.state, SimpleNamespace(run_id=self.run_id))
        assert list(answer.message_ids) == [message.object_id]
        for object_id, part in get_all_nested_objects(message).items():
            session_id = answer.session_id
            assert self.state.store_object(self.run_id, session_id, object_id, part.deflate())
        return message

    def num_rows(self, table: str) -> int:
        """Count the rows of one of Flower's tables."""
        with closing(sqlite3.connect(self.database)) as connection:
            (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)

    def message(self, source: int, destination: int, reply_to: str = "") -> Message:
        # The salt is ours: two messages have no record in common.
        head = ConfigRecord({"document": "{}", "salt": secrets.token_bytes(16)})
        records = RecordDict({"head": head})
        message = Message(records, dst_node_id=destination, message_type="query", ttl=60.0)
        fields = message.metadata.__dict__
        fields |= {
            "_run_id": self.run_id,
            "_src_node_id": source,
            "_reply_to_message_id": reply_to,
        }
        if reply_to:
            # A reply may not live longer than what it answers.
            fields["_ttl"] = 30.0
        fields["_message_id"] = message.object_id
        return message


def open_state(database: str) -> Any:
    manager = NoOpFederationManager()
    state = LinkStateFactory(database, manager, ObjectStoreFactory(database)).state()
    manager.linkstate = state
    return state


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flower's tables, which take seconds to make."""
    database = str(tmp_path_factory.mktemp("empty") / "superlink.db")
    open_state(database)
    return database


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: str) -> World:
    # Flower knows these in the process of a ServerApp.
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    # Enough to see a bound; each message takes a tenth of a second.
    monkeypatch.setattr(superlink, "MAX_EXCHANGES", 2)
    database = str(tmp_path / "superlink.db")
    # The pages that are still in the journal are copied as well.
    with (
        closing(sqlite3.connect(empty_database)) as source,
        closing(sqlite3.connect(database)) as copy,
    ):
        source.backup(copy)
    state = open_state(database)
    nodes = [state.create_node("owner", "owner", name, 60.0) for name in (b"north", b"south")]
    for node in nodes:
        assert state.activate_node(node, 60.0)
    run_id = state.create_run(
        "archipelago/archipelago",
        "0.1.0",
        "0" * 64,
        {},
        NOOP_FEDERATION_ID,
        None,
        "owner",
        TaskType.SERVER_APP,
    )
    (run,) = state.get_run_info(run_ids=[run_id])
    assert state.claim_task(run.primary_task_id)
    assert state.activate_task(run.primary_task_id)
    return World(state, database, run_id, nodes[0], nodes[1], superlink.Exchanges())


def pushed(node_id: int, message: Message, tree: ObjectTree | None = None) -> PushMessagesRequest:
    return PushMessagesRequest(
        node=Node(node_id=node_id),
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[tree or get_object_tree(message)],
    )


def test_reply_to_what_the_superlink_asked_is_taken(world: World) -> None:
    asked = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, asked.metadata.message_id)
    assert reply.object_id in world.push(pushed(world.north, reply))


def test_reply_is_taken_once(world: World) -> None:
    """The attack: push it again after it was fetched, so that its objects stay on the disk."""
    asked = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, asked.metadata.message_id)
    world.push(pushed(world.north, reply))
    with pytest.raises(FlowerError):
        world.push(pushed(world.north, reply))


def test_reply_that_is_pushed_twice_at_once_is_taken_once(world: World) -> None:
    both = threading.Barrier(2)

    def push(request: PushMessagesRequest, _: object) -> PushMessagesResponse:
        # Waits for a second push to come this far.
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)
        return PushMessagesResponse(objects_to_push=[request.messages_list[0].metadata.message_id])

    checked = world.exchanges.take_replies_only(push)
    question = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, question.metadata.message_id)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(checked, pushed(world.north, reply), world.state) for _ in range(2)]
    failures = [future.exception() for future in futures]
    assert sorted(type(failure) is FlowerError for failure in failures) == [False, True]
    assert None in failures


@pytest.mark.parametrize("runtime_s", [float("inf"), float("-inf"), float("nan"), -1.0])
def test_time_that_no_application_takes_is_refused(world: World, runtime_s: float) -> None:
    asked = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, asked.metadata.message_id)
    request = pushed(world.north, reply)
    request.clientapp_runtime_list.append(runtime_s)
    with pytest.raises(FlowerError):
        world.push(request)


def test_message_that_nobody_asked_for_is_refused(world: World) -> None:
    """The attacks: fill the disk, or speak to another silo as if the SuperLink did."""
    for source in (world.north, SUPERLINK):
        message = world.message(source, world.south)
        with pytest.raises(FlowerError):
            world.push(pushed(world.north, message))
    assert world.state.get_message_ins(world.south, 5) == []


def test_reply_in_the_name_of_another_node_is_refused(world: World) -> None:
    asked = world.ask(world.south)
    reply = world.message(world.south, SUPERLINK, asked.metadata.message_id)
    with pytest.raises(FlowerError):
        world.push(pushed(world.north, reply))
    # In its own name it answers nothing that it was asked.
    reply = world.message(world.north, SUPERLINK, asked.metadata.message_id)
    assert world.push(pushed(world.north, reply)) == []


def test_reply_that_announces_other_or_too_many_objects_is_refused(world: World) -> None:
    asked = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, asked.metadata.message_id)
    leaves = [ObjectTree(object_id=f"{number:064x}") for number in range(MAX_OBJECTS)]
    too_many = ObjectTree(object_id=reply.object_id, children=leaves)
    another = ObjectTree(object_id="0" * 64)
    for tree in (too_many, another):
        with pytest.raises(FlowerError):
            world.push(pushed(world.north, reply, tree))
    twice = pushed(world.north, reply)
    twice.messages_list.append(twice.messages_list[0])
    for request in (twice, PushMessagesRequest(node=Node(node_id=world.north))):
        with pytest.raises(FlowerError):
            world.push(request)
    most = ObjectTree(object_id=reply.object_id, children=leaves[1:])
    assert len(world.push(pushed(world.north, reply, most))) == MAX_OBJECTS


def reply_to(world: World, request: Message) -> tuple[Message, str]:
    """Push a reply of the north; return it, and the session for its objects."""
    reply = world.message(world.north, SUPERLINK, request.metadata.message_id)
    checked = world.exchanges.take_replies_only(fleet_handlers.push_messages)
    answer = checked(pushed(world.north, reply), world.state)
    assert set(answer.objects_to_push) == set(get_all_nested_objects(reply))
    return reply, answer.session_id


def test_store_stays_small_when_nobody_fetches_what_a_node_replies(world: World) -> None:
    """The attack: connect again, so that the ServerApp gives up its requests, then reply to them, until it is full."""
    sizes = []
    for number in range(3 * superlink.MAX_EXCHANGES):
        reply, session_id = reply_to(world, world.ask(world.north))
        # The last object never comes: neither does Flower close the session.
        for object_id, part in list(get_all_nested_objects(reply).items())[:-1]:
            assert world.push_object(world.north, session_id, object_id, part.deflate())
        if number >= superlink.MAX_EXCHANGES:
            tables = ("objects", "message_ins", "message_res", "object_push_session_pending")
            sizes.append([world.num_rows(table) for table in tables])
    assert sizes[0] == sizes[-1]
    # A message is three objects: itself, its records and its head.
    num = superlink.MAX_EXCHANGES
    assert sizes[0] == [2 * 3 * num, num, num, num]


def test_store_stays_small_when_a_node_takes_no_request(world: World) -> None:
    for _ in range(2 * superlink.MAX_EXCHANGES):
        world.ask(world.north)
    assert world.num_rows("message_ins") == superlink.MAX_EXCHANGES
    assert world.num_rows("objects") == 3 * superlink.MAX_EXCHANGES


def test_newest_request_stays_and_those_of_another_node_too(world: World) -> None:
    first = world.ask(world.south)
    for _ in range(2 * superlink.MAX_EXCHANGES):
        last = world.ask(world.north)
    for request in (first, last):
        assert world.state.object_store.get(request.object_id)
    reply_to(world, last)


def test_reply_to_a_request_that_was_removed_leaves_nothing(world: World) -> None:
    requests = [world.ask(world.north) for _ in range(superlink.MAX_EXCHANGES + 1)]
    num_objects = world.num_rows("objects")
    late = world.message(world.north, SUPERLINK, requests[0].metadata.message_id)
    assert world.push(pushed(world.north, late)) == []
    assert world.num_rows("objects") == num_objects
    assert world.num_rows("object_push_sessions") == 0


def test_reply_whose_push_failed_may_be_pushed_again_a_few_times(world: World) -> None:
    request = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, request.metadata.message_id)
    spoiled = pushed(world.north, reply, ObjectTree(object_id=reply.object_id))
    spoiled.message_object_trees[0].children.add(object_id="no digest")
    for error in (ValueError, ValueError, None, FlowerError):
        if error is None:
            assert reply.object_id in world.push(pushed(world.north, reply))
            continue
        with pytest.raises(error):
            world.push(spoiled)


def test_reply_that_names_an_object_of_another_message_is_refused(world: World) -> None:
    """The attack: what an earlier reply left stays for as long as a later one names it."""
    earlier, session_id = reply_to(world, world.ask(world.north))
    contents = get_all_nested_objects(earlier)
    for object_id, part in contents.items():
        assert world.push_object(world.north, session_id, object_id, part.deflate())
    request = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, request.metadata.message_id)
    for shared in (get_object_tree(earlier), get_object_tree(request)):
        tree = ObjectTree(object_id=reply.object_id, children=[shared])
        with pytest.raises(FlowerError):
            world.push(pushed(world.north, reply, tree))
    assert reply.object_id in world.push(pushed(world.north, reply))


def test_push_that_fails_again_and_again_is_refused(world: World) -> None:
    """The attack: each leaves a row in Flower's database."""
    request = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, request.metadata.message_id)
    spoiled = pushed(world.north, reply, ObjectTree(object_id=reply.object_id))
    spoiled.message_object_trees[0].children.add(object_id="no digest")
    errors = []
    for _ in range(10):
        with pytest.raises((ValueError, FlowerError)) as failure:
            world.push(spoiled)
        errors.append(failure.type)
    assert errors == [ValueError] * 3 + [FlowerError] * 7


def test_objects_of_one_reply_are_no_larger_than_a_reply(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, session_id = reply_to(world, world.ask(world.north))
    contents = {
        object_id: part.deflate() for object_id, part in get_all_nested_objects(reply).items()
    }
    monkeypatch.setattr(superlink, "MAX_REPLY_BYTES", sum(map(len, contents.values())) - 1)
    object_ids = list(contents)
    for object_id in object_ids[:-1]:
        # What is not stored does not count.
        assert not world.push_object(world.north, session_id, "0" * 64, b"another")
        assert world.push_object(world.north, session_id, object_id, contents[object_id])
    with pytest.raises(FlowerError):
        world.push_object(world.north, session_id, object_ids[-1], contents[object_ids[-1]])


def test_object_of_another_node_or_of_no_session_is_not_stored(world: World) -> None:
    reply, session_id = reply_to(world, world.ask(world.north))
    world.ask(world.south)
    content = reply.deflate()
    assert not world.push_object(world.south, session_id, reply.object_id, content)
    assert not world.push_object(world.north, "", reply.object_id, content)
    assert world.push_object(world.north, session_id, reply.object_id, content)


def test_store_holds_nothing_from_before_its_start(world: World) -> None:
    reply_to(world, world.ask(world.north))
    superlink.remove_old_messages(world.state)
    for table in ("objects", "message_ins", "message_res", "object_push_sessions"):
        assert world.num_rows(table) == 0, table


def test_message_that_a_node_confirms_too_early_costs_that_message_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the SuperLink deletes what is confirmed, the ServerApp cannot upload the rest, and ends for all."""
    message_ids = []

    class Client:
        def PushMessages(self, request: PushAppMessagesRequest) -> Any:
            answer = runtime_handlers.push_messages(
                request, world.state, SimpleNamespace(run_id=world.run_id)
            )
            (taken,) = world.state.get_message_ins(world.north, 1)
            message_ids.append(taken.metadata.message_id)
            confirmation = ConfirmMessageReceivedRequest(
                node=Node(node_id=world.north),
                run_id=world.run_id,
                message_object_id=taken.metadata.message_id,
            )
            fleet_handlers.confirm_message_received(
                confirmation, world.state, world.state.object_store
            )
            return answer

        def PushObject(self, request: PushObjectRequest) -> Any:
            return runtime_handlers.push_object(
                request, world.state, SimpleNamespace(run_id=world.run_id)
            )

    monkeypatch.setattr(TaskIdentity, "_run_id", world.run_id)
    grid = HttpGrid(token="token")
    monkeypatch.setattr(grid, "_client", Client())
    monkeypatch.setattr(grid, "_run", SimpleNamespace(run_id=world.run_id))
    query = StatusQuery(
        plan_id="digits-3f9a1c2e", known=Status(), received=0, max_bytes=0, wait_s=0
    )
    with pytest.raises(TransportError):
        FlowerCarrier(grid, 100).send(TransferNode(world.north, "first"), Envelope(query), 60.0)
    assert len(message_ids) == 1


def test_flower_s_own_names_are_there_and_a_version_without_them_is_refused() -> None:
    superlink.require_name(fleet_handlers, "push_messages")
    with pytest.raises(SetupError, check=has_subject("flwr")):
        superlink.require_name(ModuleType("flower"), "push_messages")
