"""The program that runs a site's Flower SuperNode, closed to the other users of its machine.

    python -P silo/courier/node.py FOLDER PORT ARGUMENTS-OF-FLOWER-SUPERNODE...

On its own, a SuperNode hands messages to whoever asks on its port of loopback, and runs whatever application the
aggregator ships. Here the programs that it works with know a secret and its certificate, both made anew at every start;
the kernel says whose a connection is; and the application must be the one of this package.
"""

import logging
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.supercore.fab import Fab
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import main as api
from flwr.supernode import start_client_internal as node
from flwr.supernode.cli.flower_supernode import flower_supernode

from ddm.errors import DigestError, SetupError
from ddm.io.files import write_atomic
from ddm.transport.application import check_application
from ddm.transport.own_user import OwnUserOnly
from ddm.transport.superexec import CLIENT_APP, superexec_command
from silo.courier.certificate import make_certificate
from silo.courier.supernode import APPLICATION_REFUSED

HOST = "127.0.0.1"
_log = logging.getLogger("flwr")


def replace(module: ModuleType, name: str, value: object) -> None:
    """Put something of ours in the place of what Flower calls by this name.

    Raises:
        SetupError: this version of Flower has nothing of this name, so that ours would never be called.
    """
    if not hasattr(module, name):
        remedy = "Install the versions of constraints.txt."
        raise SetupError(
            "flwr", expected=f"{module.__name__}.{name}", got="another version", remedy=remedy
        )
    setattr(module, name, value)


def close_port(create_app: Callable[..., Any]) -> Callable[..., Any]:
    """Let the server that Flower makes answer this user only."""

    def create(*arguments: object, **settings: object) -> Any:
        app = create_app(*arguments, **settings)
        app.add_middleware(OwnUserOnly)
        return app

    return create


def pin_application(connect: Callable[..., Any]) -> Callable[..., Any]:
    """Let Flower's connection to the aggregator give no application but this package's.

    Another one counts as that of a run that has ended: its messages are left unanswered, and the next run may be right.
    """

    @contextmanager
    def connect_pinned(*arguments: object, **settings: object) -> Iterator[tuple[object, ...]]:
        with connect(*arguments, **settings) as (node_id, receive, send, get_run, get_fab, *others):

            def get_checked(digest: str, run_id: int) -> Fab:
                fab: Fab = get_fab(digest, run_id)
                try:
                    check_application(fab.content)
                except DigestError as error:
                    _log.error("%s: %s", APPLICATION_REFUSED, error)
                    raise RunNotRunningException from error
                return fab

            yield (node_id, receive, send, get_run, get_checked, *others)

    return connect_pinned


def make_secrets(folder: Path) -> Mapping[str, Path]:
    """Make the secret and the certificate of one start, readable by this user only."""
    paths = {name: folder / name for name in ("superexec.secret", "node.pem", "node.key")}
    certificate, key = make_certificate(HOST)
    for name, data in zip(paths, (secrets.token_bytes(32), certificate, key), strict=True):
        write_atomic(paths[name], data, mode=0o600)
    return paths


def main(folder: Path, port: int, arguments: list[str]) -> None:
    """Run the SuperNode, and beside it the program that takes its tasks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    paths = make_secrets(folder)
    secret, certificate = paths["superexec.secret"], paths["node.pem"]
    replace(api, "create_app", close_port(api.create_app))
    replace(node, "http_request_response", pin_application(node.http_request_response))
    subprocess.Popen(
        superexec_command(f"{HOST}:{port}", certificate, secret, CLIENT_APP),
        stdin=subprocess.DEVNULL,
    )
    sys.argv = [
        "flower-supernode",
        *arguments,
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        *("--ssl-certfile", str(certificate), "--ssl-ca-certfile", str(certificate)),
        *("--ssl-keyfile", str(paths["node.key"])),
        *("--host", HOST, "--port", str(port)),
    ]
    flower_supernode()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
