"""The program that runs the aggregator's Flower SuperLink, closed to the other users of its machine.

    python -P aggregator/runtime/superlink.py ARGUMENTS-OF-FLOWER-SUPERLINK...

On one port Flower serves silos, people who submit code, and its own programs; behind nginx, strangers on the network
reach the first only. On loopback other users would reach all three, and submitted code runs as the user of `aggregator
run`. So this server looks up in the kernel's tables whose each connection is; only silos' requests, which Flower
authenticates by their nodes' keys, are answered regardless of who sends them.
"""

import os
import sys

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware

from ddm.errors import SetupError
from ddm.transport.own_user import OwnUserMiddleware

# The paths that nginx lets through.
FLEET = r"/v1/fleet/[a-z-]{1,40}"


def close_port() -> None:
    """Let Flower put our check before everything else that its server does.

    Raises:
        SetupError: this version of Flower has no place for it.
    """
    if not hasattr(extensions, "get_middleware"):
        raise SetupError(
            "flwr",
            expected="extensions.get_middleware",
            got="another version",
            remedy="Install the versions of constraints.txt.",
        )
    get_middleware = extensions.get_middleware

    def get_middleware_after_ours() -> tuple[Middleware, ...]:
        return Middleware(OwnUserMiddleware, open_to_all=FLEET), *get_middleware()

    extensions.get_middleware = get_middleware_after_ours


if __name__ == "__main__":
    # The database and what Flower keeps beside it are for this user alone.
    os.umask(0o077)
    close_port()
    sys.argv[0] = "flower-superlink"
    flower_superlink()
