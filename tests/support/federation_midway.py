"""A federation in the middle of its work: what the aggregator's own code leaves in the folders, without the silos."""

import json
import shutil
from pathlib import Path

from aggregator.config import Federation
from ddm.io.files import write_atomic
from ddm.io.settings import save_settings
from ddm.protocol.base import now_utc
from ddm.protocol.receipt import RECEIPT_KIND, AcceptedVerdict, Receipt, RefusedVerdict
from ddm.publishing.keys import load_key
from ddm.system.processes import free_port
from ddm.transport.messages import IndexEntry, Span
from ddm.transport.shards import PartFolder
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from tests.support.federation import PASSPHRASE

SHARD = 1 << 20


def on_free_port(federation: Federation) -> Federation:
    """Move a federation to a port that nothing listens on."""
    settings = federation.settings().model_copy(update={"port": free_port()})
    save_settings(settings, federation.path / "federation.toml", "test")
    return federation


class AggregatorStandIn:
    """Plays the ServerApp and the intake desk for one plan, of which nothing has arrived yet."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.plan, self.plan_digest = federation.current_plan()
        self.clear()

    def clear(self) -> None:
        """Nothing has arrived."""
        fed = self.federation
        for folder in (fed.incoming, fed.receipts, fed.accepted, fed.releases, fed.quarantine):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def incoming(self, silo_id: str) -> Path:
        """Return where a silo's submissions arrive."""
        folder = self.federation.incoming / self.plan.plan_id / silo_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def report(
        self,
        silo_id: str,
        state: str,
        progress: int = 0,
        code: object = 0,
    ) -> None:
        """The silo answers; `code` says that it needs a person, or is rubbish."""
        status = {"state": state, "progress": progress, "sequence": 0, "code": code}
        write_atomic(self.incoming(silo_id) / "status.json", json.dumps(status).encode())
        (self.incoming(silo_id) / "seen").touch()

    def arrive(self, silo_id: str, num_shards: int, of: int, sequence: int = 1) -> None:
        """The first shards of a submission are here."""
        files = (
            IndexEntry(path="counts.safetensors", num_bytes=8),
            IndexEntry(path="expert", num_bytes=of * SHARD),
        )
        part = PartFolder(self.incoming(silo_id) / str(sequence), files)
        part.write([(Span(path="counts.safetensors", offset=0, num_bytes=8), b"8 bytes.")])
        part.write(
            (Span(path="expert", offset=at * SHARD, num_bytes=SHARD), bytes(SHARD))
            for at in range(num_shards)
        )

    def answer(
        self,
        silo_id: str,
        verdict: AcceptedVerdict | RefusedVerdict,
        sequence: int = 1,
        key: SigningKey | None = None,
    ) -> None:
        """Intake answers a submission; whoever holds no receipt key signs with another."""
        receipt = Receipt(
            plan_id=self.plan.plan_id,
            plan_digest=self.plan_digest,
            silo_id=silo_id,
            sequence=sequence,
            submission_digest=None,
            verdict=verdict,
            at=now_utc(),
        )
        path = self.federation.receipts / self.plan.plan_id / silo_id / f"{sequence}.json"
        key = key or load_key(self.federation, "receipts", PASSPHRASE)
        write_atomic(path, seal(receipt.encode(), RECEIPT_KIND, key))

    def set_aside(self, silo_id: str, reason: str, sequence: int = 1) -> None:
        """Screening sets a submission aside."""
        path = (
            self.federation.quarantine / self.plan.plan_id / silo_id / str(sequence) / "reason.json"
        )
        write_atomic(path, json.dumps({"reasons": [reason]}).encode())

    def programs(self, **programs: object) -> None:
        """What `aggregator run` notes of its programs."""
        write_atomic(self.federation.path / "flower" / "info.json", json.dumps(programs).encode())
