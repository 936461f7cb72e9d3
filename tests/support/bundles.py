"""Signed bundles and receipts of a small federation, without images, training or torch."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from ddm.protocol.base import now_utc, sha256_hex
from ddm.protocol.receipt import RECEIPT_KIND, AcceptedVerdict, Receipt
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import sign_metadata
from ddm.trust.repository import Repository
from tests.support.documents import plan_document, to_bytes

ROLES = ("root", "targets", "online", "plans", "release", "receipts", "north")


@dataclass
class Signer:
    """Holds all keys of a federation whose metadata lie in `folder`; its plans name the silo north."""

    folder: Path
    keys: dict[str, SigningKey] = field(
        default_factory=lambda: {role: SigningKey.generate() for role in ROLES}
    )

    def __post_init__(self) -> None:
        keys = self.keys
        online = Holders((keys["online"].public,))
        holders = {
            "root": Holders((keys["root"].public,)),
            "targets": Holders((keys["targets"].public,)),
            "snapshot": online,
            "timestamp": online,
        }
        root = draft_root(1, holders, now_utc())
        targets = draft_targets(
            1, Delegates(keys["plans"].public, keys["release"].public), now_utc()
        )
        self.repository = Repository.create(
            self.folder,
            root=sign_metadata(root, [keys["root"]]),
            targets=sign_metadata(targets, [keys["targets"]]),
            plans_key=keys["plans"],
            release_key=keys["release"],
            online_key=keys["online"],
            now=now_utc(),
        )

    @property
    def root(self) -> bytes:
        """What a site pins."""
        return (self.folder / "1.root.json").read_bytes()

    def sign(self, bundle: Path, plan_id: str, files: dict[str, bytes]) -> None:
        """Lay out a bundle whose plan names the receipt key; `files` lie beside plan.json."""
        shutil.rmtree(bundle, ignore_errors=True)
        document = plan_document(
            plan_id=plan_id, silos=["north"], receipt_key=str(self.keys["receipts"].public)
        )
        contents = {"plan.json": to_bytes(document), **files}
        for name, data in contents.items():
            path = bundle / "targets" / plan_id / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        silos = {"north": self.keys["north"].public}
        delegates = Delegates(
            self.keys["plans"].public, self.keys["release"].public, plan_id, silos
        )
        self.repository.start_plan(
            plan_id,
            {f"{plan_id}/{name}": (len(data), sha256_hex(data)) for name, data in contents.items()},
            targets=sign_metadata(
                self.repository.next_targets(delegates, now_utc()), [self.keys["targets"]]
            ),
            plans_key=self.keys["plans"],
            release_key=self.keys["release"],
            online_key=self.keys["online"],
            now=now_utc(),
        )
        self.repository.export_bundle(bundle)

    def receipt(
        self,
        bundle: Path,
        plan_id: str,
        silo_id: str = "north",
        sequence: int = 1,
        **changes: object,
    ) -> bytes:
        """Return an acceptance, sealed with the receipt key.

        Args:
            bundle: of the plan, whose digest the receipt states.
            plan_id: of the plan.
            silo_id: whose submission is accepted.
            sequence: of the submission.
            changes: other fields of the receipt; `key` names another role that seals it, as an attacker would.
        """
        key = self.keys[str(changes.pop("key", "receipts"))]
        plan = (bundle / "targets" / plan_id / "plan.json").read_bytes()
        receipt = Receipt(
            plan_id=plan_id,
            plan_digest=sha256_hex(plan),
            silo_id=silo_id,
            sequence=sequence,
            submission_digest="0" * 64,
            verdict=AcceptedVerdict(),
            at=now_utc(),
        )
        return seal(receipt.model_copy(update=changes).encode(), RECEIPT_KIND, key)


def site_settings(site: Path, silo_id: str = "north") -> None:
    """What `silo init` writes, as far as the courier reads it: silo.toml and a copy of the root beside its key."""
    (site / "courier").mkdir(parents=True, exist_ok=True)
    lines = (
        f'silo_id = "{silo_id}"',
        'data = "-"',
        'federation = "digits"',
        'address = "fed.example:9092"',
        f'root_digest = "{"0" * 64}"',
    )
    (site / "silo.toml").write_text("".join(f"{line}\n" for line in lines))
