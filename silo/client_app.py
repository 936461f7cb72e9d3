"""The Flower ClientApp: passes each message to `silo.courier.handlers`, in a new process for every message, no torch.

Run as a program, this module signs the site's node off: Flower counts a killed node as connected for another minute
and does not let it connect again meanwhile.
"""

import logging
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ddm.errors import ArchipelagoError
from ddm.system.logs import follow_logging
from ddm.transport.flower import decode_request, encode
from ddm.transport.messages import BundleProgress, Envelope
from silo.courier.handlers import SiteLimits, answer

_log = logging.getLogger(__name__)


def handle(message: Message, context: Context) -> Message:
    """Answer one Flower message; a request that cannot be read is answered with the error's code.

    Args:
        message: what came from the aggregator.
        context: Flower's; only the node configuration is used.

    Returns:
        The reply.
    """
    follow_logging()
    try:
        # From the courier's command line: nothing in the message has a say in what this site takes.
        limits = SiteLimits.from_node_config(context.node_config)
        reply = answer(decode_request(message.content, max_bytes=limits.shard_bytes), limits)
    except ArchipelagoError as error:
        # Which reply was expected is unknown, since the request could not be read; any kind carries the code.
        reply = Envelope(BundleProgress(code=error.exit_code))
    except Exception:
        # Flower would send the exception's text, with paths of this machine, to the aggregator.
        reply = Envelope(BundleProgress(code=ArchipelagoError.exit_code))
    _log.debug("answered with %s, code %d", reply.message.kind, reply.message.code)
    return Message(encode(reply), reply_to=message)


def sign_off(address: str, node_id: int, courier: Path) -> None:
    """Tell the SuperLink that this node is gone, signed with the node's own key.

    Args:
        address: the aggregator, `host:port`.
        node_id: Flower's number for this node.
        courier: the site's folder with `node.key` and `ca.pem`.
    """
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    from silo.courier.connection import close_client

    # Without a passphrase, since Flower's own client reads this file and cannot ask for one.
    key = load_ssh_private_key((courier / "node.key").read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return
    authentication = NodeAuthHttpInterceptor(key, key.public_key())
    with FleetHttpClient.from_server_address(
        address, False, str(courier / "ca.pem"), interceptors=[authentication]
    ) as client:
        close_client(client)
        # Signed with the node's key, so that nobody else can sign this node off.
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


app = ClientApp()
app.query()(handle)

if __name__ == "__main__":
    sign_off(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
