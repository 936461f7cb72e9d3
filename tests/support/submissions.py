"""A submission that has arrived at the aggregator, for tests to tamper with as a cheating silo would."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ddm.errors import ArchipelagoError
from ddm.protocol.base import now_utc, sha256_file, sha256_hex
from ddm.protocol.receipt import Receipt
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata
from tests.support.federation import PlannedFederation, TinyFederation

SILO = "north"


@dataclass
class Arrival:
    """A submission that has arrived and may be tampered with before intake sees it."""

    tiny: TinyFederation
    plan_id: str
    folder: Path
    key: SigningKey

    @property
    def document_path(self) -> Path:
        """The submission's document."""
        return self.folder / "silos" / SILO / "submission.json"

    @property
    def expert_path(self) -> Path:
        """The expert's weights."""
        return self.folder / "silos" / SILO / "experts" / SILO / "expert.safetensors"

    @property
    def role_path(self) -> Path:
        """What the silo signed."""
        return self.folder / "metadata" / f"{self.plan_id}.{SILO}.json"

    def document(self) -> dict:
        """Read the document as it stands."""
        return json.loads(self.document_path.read_bytes())

    def rewrite(
        self,
        change: Callable[[dict], None],
        *,
        key: SigningKey | None = None,
        version: int = 1,
        root_digest: str | None = None,
    ) -> None:
        """Change the document, describe the files as they now are, and sign it all again as a cheating silo would."""
        document = self.document()
        for entry in document["experts"] + document["statistics"]:
            path = self.folder / entry["file"]["path"]
            entry["file"] |= {"bytes": path.stat().st_size, "digest": sha256_file(path)}
        change(document)
        encoded = json.dumps(document).encode()
        self.document_path.write_bytes(encoded)
        prefix = f"{self.plan_id}/"
        signed = {f"{prefix}silos/{SILO}/submission.json": (len(encoded), sha256_hex(encoded))}
        for expert in document["experts"]:
            signed[prefix + expert["file"]["path"]] = (
                expert["file"]["bytes"],
                expert["file"]["digest"],
            )
        role = sign_silo_metadata(
            self.plan_id,
            SILO,
            signed,
            key or self.key,
            root_digest=root_digest or self.tiny.federation.root_digest,
            version=version,
            now=now_utc(),
        )
        self.role_path.write_bytes(role)

    def change_counts(
        self, change: Callable[[torch.Tensor], torch.Tensor], kind: str = "counts"
    ) -> None:
        """Change the histogram and sign it all again."""
        self.change_release(kind, "counts", change)

    def change_release(
        self, kind: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Change one tensor of a release and sign it all again."""
        path = self.folder / f"{kind}.safetensors"
        tensors = load_file(path)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, path)
        self.rewrite(lambda document: None)

    def drop_expert(self, expert_id: str) -> None:
        """Send everything but one expert, as if it had never been trained."""
        shutil.rmtree(self.folder / "silos" / SILO / "experts" / expert_id)
        document = self.document()
        kept = [expert for expert in document["experts"] if expert["expert_id"] != expert_id]
        self.document_path.write_text(json.dumps(document | {"experts": kept}))
        self.rewrite(lambda document: None)

    @property
    def accepted(self) -> Path:
        """Where intake keeps it once it is accepted."""
        return self.tiny.federation.accepted / self.plan_id / SILO

    @property
    def receipts(self) -> Path:
        """Where intake answers it."""
        return self.tiny.federation.receipts / self.plan_id / SILO

    def arrive_again(self, sequence: int) -> Path:
        """Put what the silo has in its outbox into incoming under another number."""
        sent = self.tiny.sites[SILO].outbox / self.plan_id / "1"
        return Path(shutil.copytree(sent, self.folder.with_name(str(sequence))))

    def verdict(self) -> Receipt:
        """Run intake, and return its answer to this submission, the silo's only one."""
        receipts = [receipt for receipt in self.tiny.take_in() if receipt.silo_id == SILO]
        assert len(receipts) == 1
        return receipts[0]

    def assert_refused(self, error: type[ArchipelagoError], *words: str) -> None:
        """Intake refuses with exactly this error, and keeps nothing."""
        verdict = self.verdict().verdict
        assert verdict.kind == "refused"
        assert verdict.code == error.exit_code, verdict.reason
        assert all(word in verdict.reason for word in words), verdict.reason
        assert not self.accepted.exists()
        assert not list(self.accepted.parent.glob("*.part"))

    def assert_discarded(self, *, times: int = 1) -> None:
        """Intake finds that the silo did not sign this: it answers nothing, keeps nothing, and ends nothing."""
        assert self.tiny.take_in() == []
        assert not self.folder.exists()
        assert not self.accepted.exists()
        assert not list(self.accepted.parent.glob("*.part"))
        assert {path.name: path.read_bytes() for path in self.receipts.iterdir()} == {
            "1.unsigned": b"%d" % times
        }


def arrive(sent: PlannedFederation, folder: Path) -> Arrival:
    """Copy a federation with a submission in an outbox to `folder`, and fetch the submission there."""
    original, plan_id = sent
    tiny = original.copy(folder)
    return Arrival(tiny, plan_id, tiny.collect(SILO, plan_id), tiny.key(SILO))
