"""What Flower hands to the ServerApp may be made up by a silo: it costs that silo's answer and nothing else."""

import subprocess
import sys

import httpx
import pytest
from flwr.supercore.task_identity import TaskIdentity

from aggregator.server_app import FlowerCarrier
from aggregator.transfer.dispatcher import Node
from ddm.errors import ArchipelagoError, TransportError
from ddm.transport.messages import Envelope, Status, StatusQuery

BOMB = """
import json, resource, sys
from types import SimpleNamespace
resource.setrlimit(resource.RLIMIT_DATA, (600 * 2**20, 600 * 2**20))
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body
from aggregator.server_app import FlowerCarrier
from ddm.errors import ArchipelagoError
honest = Array(dtype="uint8", shape=(5 << 20,), stype="archipelago.bytes", data=bytes(5 << 20))
chunks = dict(honest.slice_array())
meta = json.loads(honest.deflate().split(b"\\0", 1)[1])
meta["arraychunk_ids"] = [0] * int(sys.argv[1])
made_up = add_header_to_object_body(json.dumps(meta).encode(), honest)

class Grid:
    def pull_messages(self, message_ids):
        record = ArrayRecord({"bytes": Array.inflate(made_up, children=chunks)})
        return [SimpleNamespace(has_error=lambda: False, content=RecordDict({"data": record}))]

try:
    FlowerCarrier(Grid(), 10 << 20).fetch("1")
except ArchipelagoError as error:
    print(type(error).__name__, error.got)
"""


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (1, "DocumentError 1 records"),
        (2000, "TransportError a reply that does not parse (MemoryError)"),
    ],
)
def test_answer_is_refused_when_it_names_one_chunk_thousands_of_times(
    times: int, said: str
) -> None:
    """The attack: 10 GB of memory for 5 MB on the wire. Named once, it is put together and judged by its content."""
    command = [sys.executable, "-W", "ignore", "-c", BOMB, str(times)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == said, result.stderr


@pytest.mark.parametrize("error", [ValueError, KeyError, TypeError, AttributeError, RecursionError])
def test_answer_is_refused_when_flower_cannot_put_it_together(error: type[Exception]) -> None:
    class UnreadableGrid:
        def pull_messages(self, message_ids: list[str]) -> list[object]:
            raise error("made up")

    with pytest.raises(TransportError):
        FlowerCarrier(UnreadableGrid(), 100).fetch("1")  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [412, 500])
def test_superlink_that_answers_with_an_error_costs_this_message_alone(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Flower knows these in the process of a ServerApp.
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    request = httpx.Request("POST", "https://127.0.0.1")
    refusal = httpx.HTTPStatusError(
        "refused", request=request, response=httpx.Response(status, request=request)
    )

    class RefusingGrid:
        def push_messages(self, messages: list[object]) -> list[str]:
            raise refusal

        def pull_messages(self, message_ids: list[str]) -> list[object]:
            raise refusal

    carrier = FlowerCarrier(RefusingGrid(), 100)  # type: ignore[arg-type]
    query = StatusQuery(
        plan_id="digits-3f9a1c2e", known=Status(), received=0, max_bytes=0, wait_s=0
    )
    with pytest.raises(TransportError):
        carrier.send(Node(1, "first"), Envelope(query), 60.0)
    with pytest.raises(TransportError):
        carrier.fetch("1")


def test_failure_of_flower_itself_is_not_taken_for_a_silos_answer() -> None:
    class UnreachableGrid:
        def pull_messages(self, message_ids: list[str]) -> list[object]:
            raise ConnectionError("the SuperLink is gone")

    with pytest.raises(ConnectionError) as failure:
        FlowerCarrier(UnreachableGrid(), 100).fetch("1")  # type: ignore[arg-type]
    assert not isinstance(failure.value, ArchipelagoError)
