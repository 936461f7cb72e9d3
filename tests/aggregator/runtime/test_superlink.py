"""What a node may push to the SuperLink: its own replies. Flower's own state and handlers, behind our check."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers

from aggregator.runtime import superlink
from ddm.errors import SetupError
from ddm.transport.flower import MAX_OBJECTS
from tests.support.errors import has_subject

# Flower's own use of Alembic.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
SUPERLINK = 1  # Flower's number for it


@dataclass
class World:
    """A SuperLink's state with a run at work, and two nodes."""

    state: Any
    run_id: int
    north: int
    south: int
    checked: Callable[..., Any]

    def push(self, request: PushMessagesRequest) -> list[str]:
        """Push as a node does; returns the objects that the SuperLink wants to have."""
        return list(self.checked(request, self.state).objects_to_push)

    def ask(self, node_id: int) -> Message:
        """Send a node a message in the SuperLink's own way."""
        message = self.message(SUPERLINK, node_id)
        session_id = self.state.start_session(self.run_id)
        stored, _ = self.state.store_message_and_object_tree(
            message, get_object_tree(message), session_id
        )
        assert stored
        return message

    def message(self, source: int, destination: int, reply_to: str = "") -> Message:
        records = RecordDict({"head": ConfigRecord({"document": "{}"})})
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


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    # Flower knows these in the process of a ServerApp.
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    manager = NoOpFederationManager()
    database = str(tmp_path / "superlink.db")
    state = LinkStateFactory(database, manager, ObjectStoreFactory(database)).state()
    manager.linkstate = state
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
    checked = superlink.take_replies_only(fleet_handlers.push_messages)
    return World(state, run_id, nodes[0], nodes[1], checked)


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

    checked = superlink.take_replies_only(push)
    asked = world.ask(world.north)
    reply = world.message(world.north, SUPERLINK, asked.metadata.message_id)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(checked, pushed(world.north, reply), None) for _ in range(2)]
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
    # In its own name it answers nothing that it was asked; Flower sees to that.
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


def test_flower_s_own_names_are_there_and_a_version_without_them_is_refused() -> None:
    superlink.require_name(fleet_handlers, "push_messages")
    with pytest.raises(SetupError, check=has_subject("flwr")):
        superlink.require_name(ModuleType("flower"), "push_messages")
