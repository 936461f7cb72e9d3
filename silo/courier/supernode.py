"""A site's courier: it keeps one Flower SuperNode alive, tied to this process, and nothing more.

The SuperNode connects out to the aggregator (TLS against `courier/ca.pem`, authenticated by `courier/node.key`), waits
for as long as it takes, and has the ClientApp started for every message (`silo.courier.node`). Flower counts a
SuperNode that was killed as connected for up to a minute, and does not let it connect again meanwhile. The courier
therefore signs a killed one off before it starts the next, and where that fails it tries again until it is let in.

On a machine that was very busy for a moment, a SuperNode answers a message twice, first with an error. From then on it
sends with every message the answer to the one before, which comes too late. It never recovers, and is started again.
So is one whose program ended without an answer, since it would wait for this answer for ever.
"""

import math
import re
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ddm.errors import SetupError
from ddm.io.files import require_file, write_atomic
from ddm.io.locks import locked
from ddm.system.processes import Child, flower_environment, free_port, script_command, spawn
from ddm.system.supervisor import Program, Supervisor
from silo.courier.clock import describe, seconds_ahead
from silo.courier.reach import explain

_NODE = "SuperNode"
_PROGRAM = Path(__file__).with_name("node.py")
_MAX_DELAY_S = 10.0
_SETTLED_S = 30.0
_CHECK_EVERY_S = 2.0
_SIGN_OFF_S = 15.0
_VAIN_S = 30.0
# At the beginning of a line: other lines may quote what was received.
_NODE_ID = re.compile(r"^INFO +: +SuperNode ID: ([0-9]{1,20})$", re.MULTILINE)
UNREACHABLE = "the aggregator cannot be reached"
REFUSED = "the connection to the aggregator was refused; courier/flwr/supernode.log says why"
_STEP = re.compile(
    r"^INFO +: +(?:(Receiving|Sending): \S+ message|(Start) `flwr-clientapp`)", re.MULTILINE
)
_PROBLEMS = {
    "Failed to activate SuperNode": "the aggregator does not let this node in: it has not enrolled the node key, or "
    "it still regards an earlier connection as alive (for a minute at most)",
    "CERTIFICATE_VERIFY_FAILED": "the aggregator's certificate is not signed by courier/ca.pem",
    "Unable to parse the private key file": "courier/node.key is not a private key that Flower can read",
    "Connection attempt failed": UNREACHABLE,
    # It makes no further attempt; a proxy that refuses is one reason.
    "Failed to initialize the connection": REFUSED,
    # Signs of a working connection.
    "SuperNode ID:": None,
    "Connection successful": None,
    "successfully": None,
}
# In one message, either way.
_SHARD_BYTES = 128 * 1024 * 1024
# Of this site's own outbox; the policy bounds each expert and their number.
_SUBMISSION_BYTES = 1024**4


def make_node_key(path: Path) -> str:
    """Make the key that authenticates this site's node, readable by its owner only, at a path where nothing is yet.

    Returns:
        The public key, one line in OpenSSH format, for the enrolment card.

    Raises:
        SetupError: a file is there already.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    data = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    try:
        write_atomic(path, data, mode=0o600, overwrite=False)
    except FileExistsError as error:
        raise SetupError(
            str(path),
            expected="no file yet",
            got="a file",
            remedy="Keep the node key that is there.",
        ) from error
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return public.decode("ascii")


def answers_late(log: str) -> bool:
    """Whether a SuperNode, by its log, sent its last answer before anything was started that could have made it."""
    steps = _steps(log)
    # What follows the last answer is a message that is being answered now.
    while steps and steps[-1] != "Sending":
        steps.pop()
    if "Receiving" not in steps:
        return False
    after_last_message = len(steps) - steps[::-1].index("Receiving")
    return "Start" not in steps[after_last_message:]


def last_started(log: str) -> bool:
    """Whether the last thing that a SuperNode's log tells is the start of a program that makes an answer."""
    return _steps(log)[-1:] == ["Start"]


def _steps(log: str) -> list[str]:
    return [match[1] or match[2] for match in _STEP.finditer(log)]


def latest_problem(log: str) -> str | None:
    """Return the last problem in a SuperNode's log, in one sentence; None where it is over, or none is known."""
    latest = max(_PROBLEMS, key=log.rfind)
    if latest not in log:
        return None
    return _PROBLEMS[latest]


class Courier:
    """One site's SuperNode, kept alive by calling `check` every second.

    Args:
        site: the site folder.
        address: the aggregator, `host:port`.
        max_bundle_bytes: most bytes of one plan's bundle that this site takes.
        max_inbox_bytes: most bytes of all files in the inbox; two bundles when None.
        max_inbox_files: most files and folders in the inbox.
        max_bytes_per_s: most bytes a second that leave; 0 for as many as the line takes.
    """

    def __init__(
        self,
        site: Path,
        *,
        address: str,
        max_bundle_bytes: int,
        max_inbox_bytes: int | None = None,
        max_inbox_files: int = 4096,
        max_bytes_per_s: int = 0,
    ) -> None:
        self._site = site.absolute()
        self._address = address
        self._limits = {
            "bundle_bytes": max_bundle_bytes,
            "shard_bytes": _SHARD_BYTES,
            "submission_bytes": _SUBMISSION_BYTES,
            "bytes_per_s": max_bytes_per_s,
            "inbox_bytes": max_inbox_bytes or 2 * max_bundle_bytes,
            "inbox_files": max_inbox_files,
        }
        self._courier = self._site / "courier"
        node = Program(
            _NODE,
            self._spawn,
            self._works,
            # Half of it, so that one check decides.
            silent_s=_CHECK_EVERY_S / 2,
            check_every_s=_CHECK_EVERY_S,
            max_per_hour=math.inf,
            longest_delay_s=_MAX_DELAY_S,
        )
        self._supervisor = Supervisor([node])
        self._wrong_clock: str | None = None
        # Since when the program that makes an answer is gone, and no answer there.
        self._vain_since: float | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Courier":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the SuperNode; it waits by itself for an aggregator that is not up yet.

        Raises:
            MissingFileError: the node key or the certificate is missing, or Flower is not installed.
            BusyError: another courier works on this site.
        """
        require_file(
            self._courier / "node.key",
            "the node key",
            remedy="Restore it from backup; only `silo init SITE --help` makes a new site, with other keys.",
        )
        require_file(
            self._courier / "ca.pem",
            "the federation's certificate",
            remedy="Restore it from backup; only `silo init SITE --help` makes a new site, with other keys.",
        )
        # Flower lets one SuperNode of a key connect at a time: a second courier would never be let in.
        self._stack.enter_context(locked(self._courier, "courier"))
        for folder in (self._courier / "flwr", self._site / "inbox"):
            folder.mkdir(exist_ok=True)
        self._supervisor.start(_NODE)

    def node_config(self) -> str:
        """What the ClientApp learns from its SuperNode: the site folder, percent-encoded, and the limits."""
        # A path may have spaces and quotes, which mean something in this text.
        entries = [f'site="{quote(str(self._site))}"']
        entries += [f"{name}={value}" for name, value in self._limits.items()]
        return " ".join(entries)

    def _sign_off(self) -> None:
        """Sign a killed SuperNode off, once; if that fails, Flower forgets it after a minute."""
        if not self._node_id_path.is_file():
            return
        node_id = self._node_id_path.read_text().strip()
        self._node_id_path.unlink()
        command = [sys.executable, "-P", "-m", "silo.client_app"]
        command += [self._address, node_id, str(self._courier)]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=flower_environment(self._courier / "flwr"),
                # Away from the terminal: Ctrl-C ends the courier, and must not end the sign-off that it starts.
                start_new_session=True,
                timeout=_SIGN_OFF_S,
                check=False,
            )

    def _spawn(self) -> Child:
        if self._num_restarts:
            # Flower ends without a message when the aggregator finds its signature too old or too new.
            self._wrong_clock = describe(seconds_ahead(self._address))
        self._sign_off()
        self._vain_since = None
        home = self._courier / "flwr"
        local_folder = home / "local"
        command = [*script_command(_PROGRAM), str(local_folder), str(free_port())]
        command += ["--superlink", self._address]
        command += ["--root-certificates", str(self._courier / "ca.pem")]
        command += ["--auth-supernode-private-key", str(self._courier / "node.key")]
        command += ["--node-config", self.node_config()]
        return spawn(
            command, log_path=home / "supernode.log", env=flower_environment(home), cwd=home
        )

    def check(self) -> None:
        """Start the SuperNode again when it has ended, ever more slowly while it keeps ending; call every second."""
        self._supervisor.check()

    def _works(self) -> bool:
        """Store the node's number for a sign-off, and return whether the SuperNode still works."""
        node = self._supervisor.child(_NODE)
        if node is None:
            return False
        if not self._node_id_path.exists():
            node_ids = _NODE_ID.findall(node.log_tail())
            # The log may name several; the last one is in force.
            if node_ids:
                write_atomic(self._node_id_path, node_ids[-1].encode())
        if time.monotonic() - node.started_at <= _SETTLED_S:
            return True
        self._wrong_clock = None
        log = node.log_tail()
        num_descendants = node.num_descendants()
        if not (num_descendants == 1 and last_started(log)):
            self._vain_since = None
        elif self._vain_since is None:
            self._vain_since = time.monotonic()
        elif time.monotonic() - self._vain_since > _VAIN_S:
            return False
        # Without the program that takes its tasks, it would hold every message for ever.
        return num_descendants != 0 and not answers_late(log)

    def stop(self) -> None:
        """End the SuperNode and all it started, within a few seconds; safe to call twice."""
        node = self._supervisor.child(_NODE)
        self._supervisor.stop()
        if node is not None and node.returncode == 0:
            # It signed off by itself.
            self._node_id_path.unlink(missing_ok=True)
        self._stack.close()

    @property
    def is_answering(self) -> bool:
        """Whether a message of the aggregator is being answered; False where the system lists no processes."""
        node = self._supervisor.child(_NODE)
        if node is None:
            return False
        # One is the program that takes the tasks. It starts another for each message.
        return (node.num_descendants() or 0) > 1

    @property
    def _node_id_path(self) -> Path:
        """Where the number that Flower gave this node is stored."""
        return self._courier / "flwr" / "node_id"

    @property
    def _num_restarts(self) -> int:
        return self._supervisor.num_restarts()[_NODE]

    @property
    def problem(self) -> str | None:
        """Why there is no connection, in one sentence, from clock and log; None while nothing is known."""
        if self._wrong_clock:
            return self._wrong_clock
        return latest_problem(self._supervisor.log_tail(_NODE))

    def why_unreachable(self) -> str | None:
        """Try a connection as Flower does; explain why it fails and what to do, None where it does not."""
        return explain(self._address, self._courier / "ca.pem")

    def info(self) -> dict[str, object]:
        """What runs: process ids of the SuperNode and its guard, how often it was restarted, what is wrong."""
        node = self._supervisor.child(_NODE)
        return {
            "supernode_pid": node.pid if node else None,
            "guard_pid": node.guard_pid if node else None,
            "num_restarts": self._num_restarts,
            "problem": self.problem,
        }
