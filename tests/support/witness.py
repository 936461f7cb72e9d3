"""A witness of logs on loopback that does what C2SP's `tlog-witness` says, written against that page alone."""

import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ddm.errors import FormatError, TrustError
from ddm.trust.log.merkle import check_consistency

COSIGNATURE = b"\x04"


class Witness(ThreadingHTTPServer):
    """Cosigns checkpoints that continue the last one that it cosigned.

    Args:
        name: of its key.
        logs: verifier keys, text, of the logs that it knows.

    Attributes:
        last: size and root of the last checkpoint that it cosigned, by the log's origin.
        said: the status of each answer.
        says: status and body of every answer from now on, where a test makes it dishonest; else None.
    """

    daemon_threads = True

    def __init__(self, name: str, logs: list[str]) -> None:
        self.name = name
        self.key = Ed25519PrivateKey.generate()
        self.logs = {log.split("+", 2)[0]: log.split("+", 2)[1:] for log in logs}
        self.last: dict[str, tuple[int, bytes]] = {}
        self.statuses: list[int] = []
        self.fixed_answer: tuple[int, bytes] | None = None
        self.guard = threading.Lock()
        super().__init__(("127.0.0.1", 0), _WitnessHandler)

    @property
    def url(self) -> str:
        """Its submission prefix."""
        return f"http://127.0.0.1:{self.server_address[1]}/submit"

    @property
    def vkey(self) -> str:
        """Its verifier key."""
        keyed = COSIGNATURE + self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        key_id = sha256(self.name.encode() + b"\n" + keyed).hexdigest()[:8]
        return f"{self.name}+{key_id}+{b64encode(keyed).decode()}"

    def add_checkpoint(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer."""
        head, _, checkpoint = body.partition(b"\n\n")
        text, _, signatures = checkpoint.partition(b"\n\n")
        lines = head.decode().split("\n")
        origin, size_line, root_line = text.decode().split("\n")
        old = int(lines[0].removeprefix("old "))
        size = int(size_line)
        root = b64decode(root_line)
        proof = [b64decode(line) for line in lines[1:]]
        if origin not in self.logs:
            return 404, b""
        if not self._signed(origin, text + b"\n", signatures.decode()):
            return 403, b""
        if old > size or len(proof) > 63 or (proof and not old):
            return 400, b""
        with self.guard:
            last, last_root = self.last.get(origin, (0, b""))
            if old != last:
                return 409, f"{last}\n".encode()
            if old == size and root != last_root:
                return 409, f"{last}\n".encode()
            if old and not is_consistent(old, last_root, size, root, proof):
                return 422, b""
            self.last[origin] = (size, root)
        at = int(time.time())
        signature = self.key.sign(f"cosignature/v1\ntime {at}\n".encode() + text + b"\n")
        key_id = bytes.fromhex(self.vkey.split("+")[1])
        line = b64encode(key_id + at.to_bytes(8, "big") + signature).decode()
        return 200, f"\u2014 {self.name} {line}\n".encode()

    def _signed(self, origin: str, text: bytes, signatures: str) -> bool:
        key_id, encoded = self.logs[origin]
        public = Ed25519PublicKey.from_public_bytes(b64decode(encoded)[1:])
        for line in signatures.splitlines():
            data = b64decode(line.split(" ")[2])
            if line.split(" ")[1] == origin and data[:4].hex() == key_id:
                try:
                    public.verify(data[4:], text)
                except InvalidSignature:
                    return False
                return True
        return False


def is_consistent(old: int, old_root: bytes, size: int, root: bytes, proof: list[bytes]) -> bool:
    """Whether a tree is the beginning of another one, by the rules that have tests of their own."""
    try:
        check_consistency(old, old_root, size, root, proof, "consistency proof")
    except (TrustError, FormatError):
        return False
    return True


class _WitnessHandler(BaseHTTPRequestHandler):
    server: Witness

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.fixed_answer is not None:
            status, answer = self.server.fixed_answer
        elif self.path == "/submit/add-checkpoint":
            status, answer = self.server.add_checkpoint(body)
        else:
            status = 404
            answer = b""
        self.server.statuses.append(status)
        self.send_response(status)
        content_type = "text/x.tlog.size" if status == 409 else "text/plain"
        self.send_header("Content-Type", content_type)
        if status == 302:
            self.send_header("Location", self.server.url + "/elsewhere")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def run_witness(name: str, logs: list[str]) -> Iterator[Witness]:
    """Run a witness until the end of the block."""
    with Witness(name, logs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
