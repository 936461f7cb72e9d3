"""The Flower ServerApp: moves files between the federation's folders and the silos, without torch.

It reads the federation folder from the environment and everything else from `flower/run.json`, both written by
`aggregator.runtime.flower`, except for the rate limits in `federation.toml`; the run's configuration, which silos see,
holds nothing about this machine. One ServerApp works on a folder at a time. A silo is identified by the key of its
node, which is registered. Intake runs in another process: this one parses what silos send, and can sign nothing.
"""

import logging
import os
import resource
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from google.protobuf.message import DecodeError

from aggregator.config import Federation
from aggregator.transfer.delivery import SiloDelivery, TransferLimits, load_bundle
from aggregator.transfer.dispatcher import Dispatcher, Node
from aggregator.transfer.settings import RUN_SETTINGS_NAME, RunSettings
from ddm.errors import BusyError, MissingFileError, SetupError, TransportError
from ddm.io.files import read_bounded
from ddm.io.locks import locked
from ddm.system.logs import JsonFormatter, LogOptions, PlainFormatter, send_logs
from ddm.transport.flower import decode_reply, encode
from ddm.transport.messages import Envelope, Reply, Request

FEDERATION_VARIABLE = "ARCHIPELAGO_FEDERATION"
LOCK_NAME = "serverapp"
HEARTBEAT = "serverapp.alive"
# The most that a hostile reply may make this process allocate before Flower has assembled it and it can be checked.
_MEMORY_BYTES = 2 * 1024**3
# Address space for the stacks of one connection's threads, which counts although it is unused.
_CHANNEL_BYTES = 32 * 1024**2
# Exceptions that Flower raises when it assembles malformed objects from a silo; its own failures have other types.
_MALFORMED_ERRORS = (
    DecodeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_log = logging.getLogger(__name__)


class FlowerCarrier:
    """Flower's connection to the SuperLink.

    Args:
        grid: the connection.
        max_bytes: most data bytes accepted in one reply.
    """

    def __init__(self, grid: Grid, max_bytes: int) -> None:
        self._grid = grid
        self._max_bytes = max_bytes

    def nodes(self) -> dict[bytes, Node]:
        """The connected nodes, by public key."""
        return {
            bytes(info.public_key): Node(int(info.node_id), str(info.last_activated_at))
            for info in self._grid.get_nodes()
        }

    def send(self, node: Node, request: Envelope[Request], ttl_s: float) -> str | None:
        """Send a request; return its message id, None when the SuperLink did not accept it.

        Raises:
            TransportError: the SuperLink answers with an error, or the silo had it delete the message meanwhile.
        """
        message = Message(
            encode(request), dst_node_id=node.node_id, message_type="query", ttl=ttl_s
        )
        try:
            message_ids = list(self._grid.push_messages([message]))
        except httpx.HTTPStatusError as error:
            raise TransportError(
                "message",
                expected="a SuperLink that takes it",
                got=f"HTTP status {error.response.status_code}",
            ) from error
        # The attack: a node confirms a message before its objects are here, whereupon the SuperLink deletes it.
        except ObjectPushError as error:
            raise TransportError(
                "message",
                expected="a SuperLink that takes its objects",
                got="a message that was deleted meanwhile",
            ) from error
        # The SuperLink answers with an empty id where it refuses a message.
        if not message_ids or not message_ids[0]:
            return None
        return str(message_ids[0])

    def fetch(self, message_id: str) -> Envelope[Reply] | None:
        """Fetch the reply to a request, None while there is none.

        Raises:
            TransportError: the message was lost, or Flower cannot assemble the reply.
            DocumentError: the message is not a reply.
        """
        try:
            messages = list(self._grid.pull_messages([message_id]))
        except _MALFORMED_ERRORS as error:
            raise TransportError(
                "message",
                expected="a reply",
                got=f"a reply that does not parse ({type(error).__name__})",
            ) from error
        except httpx.HTTPStatusError as error:
            raise TransportError(
                "message",
                expected="a SuperLink that hands out the reply",
                got=f"HTTP status {error.response.status_code}",
            ) from error
        if not messages:
            return None
        message = messages[0]
        if message.has_error():
            raise TransportError(
                "message",
                expected="a reply",
                got=f"Flower's error code {int(message.error.code)}",
            )
        try:
            return decode_reply(message.content, max_bytes=self._max_bytes)
        # The limit that `main` sets on this process turns a reply that is too large into this error.
        except MemoryError as error:
            raise TransportError(
                "message",
                expected=f"a reply with at most {self._max_bytes} bytes of data",
                got="a reply that does not fit into memory",
            ) from error


def make_dispatcher(grid: Grid, fed: Path, settings: RunSettings) -> Dispatcher:
    """Set up the conversations with all silos of a plan.

    Args:
        grid: Flower's connection to the SuperLink.
        fed: the federation folder.
        settings: the settings of the run.
    """
    index = load_bundle(fed / "plans" / settings.plan_id / "bundle")
    limits = TransferLimits(
        shard_bytes=settings.shard_bytes,
        max_submission_bytes=settings.max_submission_bytes,
        wait_s=settings.wait_s,
    )
    deliveries = {
        node_identity(key): SiloDelivery(
            fed,
            settings.plan_id,
            silo_id,
            index=index,
            limits=limits,
            takes_part=silo_id not in settings.receipts_only,
            carried_from=settings.carried_from.get(silo_id),
        )
        for silo_id, key in settings.nodes.items()
    }
    max_bytes_per_s, max_silo_bytes_per_s = _rate_caps(fed)
    return Dispatcher(
        FlowerCarrier(grid, settings.shard_bytes),
        deliveries,
        stopped=lambda: _stop_requested(fed / "flower"),
        max_bytes_per_s=max_bytes_per_s,
        max_silo_bytes_per_s=max_silo_bytes_per_s,
        max_in_flight=settings.max_in_flight,
    )


def _rate_caps(fed: Path) -> tuple[int | None, int | None]:
    """Return the caps on what all silos and each silo send, in bytes a second; None for none.

    A change of federation.toml applies from the next ServerApp on.
    """
    try:
        settings = Federation(fed).settings()
    except MissingFileError:
        return None, None
    return settings.max_bytes_per_s, settings.max_silo_bytes_per_s


def _stop_requested(flower: Path) -> bool:
    """Whether to stop; called about once a second, so it also updates the ServerApp's heartbeat."""
    (flower / HEARTBEAT).touch()
    return (flower / "stop").exists()


def node_identity(openssh_key: str) -> bytes:
    """Return a node's public key in the form in which Flower reports it.

    Args:
        openssh_key: one line in OpenSSH format.

    Returns:
        The same key as PEM.

    Raises:
        SetupError: not an OpenSSH public key.
    """
    try:
        key = load_ssh_public_key(openssh_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SetupError(
            "node key",
            expected="an OpenSSH public key",
            got=f"{len(openssh_key)} characters that are not such a key",
            remedy="Restore registry/ from backup: a silo's card there holds its node key.",
        ) from error
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def main(grid: Grid, context: Context) -> None:
    """Exchange files for the plan in `flower/run.json`; wait while another ServerApp still works on this folder.

    Args:
        grid: Flower's connection.
        context: Flower's; unused.
    """
    fed = Path(os.environ[FEDERATION_VARIABLE])
    _log_to(fed / "flower" / "logs" / "serverapp.log")
    settings = RunSettings.model_validate_json(
        read_bounded(fed / "flower" / RUN_SETTINGS_NAME, 1024 * 1024)
    )
    # An array that names one chunk a million times is small on the wire; here it only fails its own silo's exchange.
    limit = _MEMORY_BYTES + len(settings.nodes) * _CHANNEL_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        while not (fed / "flower" / "stop").exists():
            try:
                with locked(fed / "flower", LOCK_NAME):
                    _log.info("plan %s, %d silos", settings.plan_id, len(settings.nodes))
                    make_dispatcher(grid, fed, settings).run()
                return
            except BusyError:
                time.sleep(1.0)
    except Exception:
        # Flower discards a ServerApp's output.
        _log.exception("the ServerApp failed")
        raise


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=4 * 1024 * 1024, backupCount=1)
    options = LogOptions.from_environment()
    if options.as_json:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(PlainFormatter(details=True))
    send_logs(handler, options)


app = ServerApp()
app.main()(main)
