"""Takes tasks of one kind from one of Flower's servers, and starts the program that carries out each.

    python -P -m ddm.transport.superexec ADDRESS CA_CERTIFICATE SECRET_FILE KIND

It does what `flower-superexec` does, except that a task's token is never in a command line, which every user of the
machine can read. The token is in a file without a name, of which the program inherits an open descriptor.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddm.system.processes import program

# Flower's names for both the kinds of tasks and the programs that carry them out.
SERVER_APP = "flwr-serverapp"
CLIENT_APP = "flwr-clientapp"
POLL_VARIABLE = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def superexec_command(
    address: str,
    ca_path: Path,
    secret_path: Path,
    kind: str,
) -> list[str]:
    """Return the command that takes tasks.

    Args:
        address: of Flower's server, host:port.
        ca_path: the authority that signed its certificate.
        secret_path: the file with the secret that it shares with this program.
        kind: `SERVER_APP` or `CLIENT_APP`.
    """
    return [
        sys.executable,
        "-P",
        "-m",
        "ddm.transport.superexec",
        address,
        str(ca_path),
        str(secret_path),
        kind,
    ]


def take_tasks(
    address: str,
    ca_path: Path,
    secret: bytes,
    kind: str,
    *,
    poll_s: float,
) -> None:
    """Take tasks of one kind until this process is ended."""
    # Imported here, since `superexec_command` is used by programs that need nothing of Flower.
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import (
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=ca_path.read_bytes(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({_ACQUIRE})
            ),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    while True:
        answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
        # Whatever the server hands out, nothing but the one kind of program is started.
        if answer.HasField("task") and answer.token and answer.task.type == kind:
            start_task(kind, address, ca_path, answer.token)
        time.sleep(poll_s)


def program_of(kind: str) -> list[str]:
    """Return the command of the program that carries out tasks of a kind."""
    if kind == CLIENT_APP:
        # Flower's own, with a log in which received texts are plain.
        return [sys.executable, "-P", "-m", "ddm.transport.clientapp"]
    return [str(program(kind))]


def start_task(
    kind: str,
    address: str,
    ca_path: Path,
    token: str,
) -> "subprocess.Popen[bytes]":
    """Start the program that carries out one task; it learns its token from a descriptor that it inherits."""
    with tempfile.TemporaryFile() as token_file:
        token_file.write(token.encode())
        token_file.flush()
        # The program shares the position of the descriptor, and reads from there.
        token_file.seek(0)
        command = program_of(kind)
        command += ["--runtime-api-address", address]
        command += ["--root-certificates", str(ca_path)]
        command += ["--token-file", f"/dev/fd/{token_file.fileno()}"]
        command += ["--parent-pid", str(os.getpid())]
        # A ServerApp keeps a log of its own.
        output = subprocess.DEVNULL if kind == SERVER_APP else None
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[token_file.fileno()],
        )


def main(
    address: str,
    ca_path: str,
    secret_path: str,
    kind: str,
) -> None:
    """Take tasks while the process that started this one lives."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supercore.utils import disable_process_dumping

    # Other processes of this user could otherwise read the secret and tokens from this one's memory.
    disable_process_dumping(strict=False)
    # The SuperNode may be killed at any time; without it, this program would ask an absent server for ever.
    start_parent_process_monitor(os.getppid())
    if kind not in (SERVER_APP, CLIENT_APP):
        raise ValueError(kind)
    poll_s = float(os.environ.get(POLL_VARIABLE, "1.0"))
    take_tasks(address, Path(ca_path), Path(secret_path).read_bytes(), kind, poll_s=poll_s)


if __name__ == "__main__":
    main(*sys.argv[1:5])
