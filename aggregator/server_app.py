"""Which messages go to which silo now? The Flower ServerApp: it moves files between folders and silos, no torch.

It finds the federation folder in the environment and everything else in `flower/run.json`, both from
`aggregator.runtime`; nothing about this machine goes into the run's configuration, which silos see. One ServerApp
works on a folder at a time. A silo is known by the Flower node of its registered key. Intake runs elsewhere.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from pydantic import Field

from aggregator.delivery import SiloDelivery, load_bundle
from ddm.errors import ArchipelagoError, BusyError, SetupError
from ddm.exchange import MAX_WAIT_S, Ask, Envelope, Request
from ddm.files import locked, read_bounded
from ddm.protocol.base import Model, PlanId, PositiveInt, SiloId
from ddm.wire import decode_reply, encode

FEDERATION_VARIABLE = "ARCHIPELAGO_FEDERATION"
LOCK_NAME = "serverapp"
_IN_FLIGHT = 4
_TTL_S = 40.0
# The slowest uplink that a shard's time to live allows for.
_BYTES_PER_S = 250_000
_NODES_EVERY_S = 2.0
_TICK_S, _IDLE_TICK_S = 0.25, 1.0
_BACKOFF_S = (2.0, 5.0, 15.0, 30.0)
_log = logging.getLogger("archipelago")


class RunSettings(Model):
    """What `aggregator.runtime` tells the ServerApp: `flower/run.json`."""

    plan_id: PlanId
    nodes: dict[SiloId, str]
    shard_bytes: PositiveInt
    max_submission_bytes: PositiveInt
    wait_s: int = Field(ge=0, le=MAX_WAIT_S)


@dataclass(frozen=True)
class Node:
    """A connected node; `session` changes whenever its SuperNode connects anew."""

    node_id: int
    session: str


@dataclass(frozen=True)
class Sent:
    """A request without an answer yet."""

    request: Request
    node: Node
    deadline: float


@dataclass
class Line:
    """One silo: its conversation, what is under way, and when to try again after a failure."""

    delivery: SiloDelivery
    sent: dict[str, Sent] = field(default_factory=dict)
    num_failures: int = 0
    not_before: float = 0.0


class Post:
    """All silos of one plan.

    Args:
        grid: Flower's connection to the SuperLink.
        fed: the federation folder.
        settings: what to do.
    """

    def __init__(self, grid: Grid, fed: Path, settings: RunSettings) -> None:
        self._grid, self._stop_path, self._settings = grid, fed / "flower" / "stop", settings
        index = load_bundle(fed / "plans" / settings.plan_id / "bundle")
        self._silo_of_key = {node_identity(key): silo_id for silo_id, key in settings.nodes.items()}
        self._lines = {
            silo_id: Line(
                SiloDelivery(
                    fed,
                    settings.plan_id,
                    silo_id,
                    index=index,
                    shard_bytes=settings.shard_bytes,
                    max_submission_bytes=settings.max_submission_bytes,
                    wait_s=settings.wait_s,
                )
            )
            for silo_id in settings.nodes
        }
        self._nodes: dict[str, Node] = {}
        self._nodes_at = 0.0

    def run(self) -> None:
        """Work until every silo is done or a stop is ordered."""
        while not self._stop_path.exists():
            self._refresh_nodes()
            for silo_id, line in self._lines.items():
                self._send(silo_id, line)
            self._receive()
            if all(line.delivery.done and not line.sent for line in self._lines.values()):
                _log.info("every silo has its receipts")
                return
            time.sleep(self._pause_s())

    def _pause_s(self) -> float:
        waiting_only = all(
            isinstance(sent.request, Ask) for line in self._lines.values() for sent in line.sent.values()
        )
        return _IDLE_TICK_S if waiting_only else _TICK_S

    def _refresh_nodes(self) -> None:
        if time.monotonic() < self._nodes_at:
            return
        self._nodes_at = time.monotonic() + _NODES_EVERY_S
        nodes: dict[str, Node] = {}
        for info in self._grid.get_nodes():
            silo_id = self._silo_of_key.get(bytes(info.public_key))
            if silo_id is not None:
                nodes[silo_id] = Node(int(info.node_id), str(info.last_activated_at))
        for silo_id in nodes.keys() ^ self._nodes.keys():
            _log.info("silo %s is %s", silo_id, "connected" if silo_id in nodes else "away")
        self._nodes = nodes

    def _send(self, silo_id: str, line: Line) -> None:
        self._give_up(silo_id, line)
        node = self._nodes.get(silo_id)
        if node is None or line.delivery.done or time.monotonic() < line.not_before:
            return
        under_way = [sent.request for sent in line.sent.values()]
        # One SuperNode answers one message after the other, so later ones live longer.
        for envelope in line.delivery.next_requests(under_way, _IN_FLIGHT - len(under_way)):
            ttl = self._ttl_s(envelope, len(line.sent) + 1)
            message = Message(encode(envelope), dst_node_id=node.node_id, message_type="query", ttl=ttl)
            (message_id,) = self._grid.push_messages([message])
            if message_id:
                line.sent[str(message_id)] = Sent(envelope.message, node, time.monotonic() + ttl)

    def _ttl_s(self, envelope: Envelope[Request], position: int) -> float:
        wait_s = envelope.message.wait_s if isinstance(envelope.message, Ask) else 0
        num_bytes: int = sum(span.num_bytes for span in getattr(envelope.message, "spans", ()))
        return wait_s + position * (_TTL_S + num_bytes / _BYTES_PER_S)

    def _give_up(self, silo_id: str, line: Line) -> None:
        """Forget requests that are too old, or that a SuperNode took along when it died."""
        session = self._nodes.get(silo_id)
        for message_id, sent in list(line.sent.items()):
            reconnected = session is not None and session.session != sent.node.session
            if reconnected or time.monotonic() > sent.deadline:
                _log.info("no answer from silo %s to %s; asking again", silo_id, sent.request.kind)
                del line.sent[message_id]

    def _receive(self) -> None:
        owners = {message_id: silo_id for silo_id, line in self._lines.items() for message_id in line.sent}
        if not owners:
            return
        for message in self._grid.pull_messages(list(owners)):
            message_id = str(message.metadata.reply_to_message_id)
            silo_id = owners.get(message_id)
            if silo_id is not None:
                self._take(silo_id, self._lines[silo_id], message_id, message)

    def _take(self, silo_id: str, line: Line, message_id: str, message: Message) -> None:
        sent = line.sent.pop(message_id)
        try:
            if message.has_error():
                code = int(message.error.code)
                _log.warning("Flower could not bring %s to silo %s: code %d", sent.request.kind, silo_id, code)
            else:
                answer = decode_reply(message.content, max_bytes=self._settings.shard_bytes)
                code = line.delivery.take(sent.request, answer)
                if code:
                    _log.warning("silo %s answered %s with code %d", silo_id, sent.request.kind, code)
        except ArchipelagoError as error:
            code = error.exit_code
            _log.warning("silo %s: %s", silo_id, error)
        if code:
            line.not_before = time.monotonic() + _BACKOFF_S[min(line.num_failures, len(_BACKOFF_S) - 1)]
            line.num_failures += 1
        else:
            line.num_failures = 0


def node_identity(openssh_key: str) -> bytes:
    """The form in which Flower reports a node's public key.

    Args:
        openssh_key: one line in OpenSSH format.

    Returns:
        The same key as PEM.

    Raises:
        SetupError: it is not a public key.
    """
    try:
        key = load_ssh_public_key(openssh_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SetupError("node key", expected="an OpenSSH public key") from error
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def main(grid: Grid, context: Context) -> None:
    """Run the post for the plan that the runtime named; wait while another ServerApp still works on this folder.

    Args:
        grid: Flower's connection.
        context: Flower's; unused, see the module's text.
    """
    fed = Path(os.environ[FEDERATION_VARIABLE])
    _log_to(fed / "flower" / "logs" / "serverapp.log")
    settings = RunSettings.model_validate_json(read_bounded(fed / "flower" / "run.json", 1024 * 1024))
    try:
        while not (fed / "flower" / "stop").exists():
            try:
                with locked(fed / "flower", LOCK_NAME):
                    _log.info("plan %s, %d silos", settings.plan_id, len(settings.nodes))
                    Post(grid, fed, settings).run()
                return
            except BusyError:
                time.sleep(1.0)
    except Exception:
        # Flower throws a ServerApp's output away.
        _log.exception("the ServerApp failed")
        raise


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=4 * 1024 * 1024, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


app = ServerApp()
app.main()(main)
