"""A tiny real federation in one process: every step for real except Flower, whose files are copied by hand."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from aggregator.config import Federation, FederationSettings
from aggregator.intake.inventory import take_inventory
from aggregator.intake.public_columns import PublicColumns
from aggregator.intake.service import IntakeService
from aggregator.membership.registry import enroll_silo
from aggregator.planning.carrying import CarriedExperts, choose_carried
from aggregator.planning.draft import Draft, draft_plan
from aggregator.planning.recipe import Recipe
from aggregator.planning.sign import sign_plan
from aggregator.release.publish import publish
from aggregator.router.train import train_router
from aggregator.setup import init_federation
from ddm.images.array_files import open_arrays
from ddm.io.modes import open_to_group
from ddm.io.settings import save_settings
from ddm.planning.networks import open_networks, open_networks_beside
from ddm.protocol.architecture import ArchitectureKind
from ddm.protocol.base import now_utc, sha256_file, sha256_hex
from ddm.protocol.enrolment import CARD_KIND, Card
from ddm.protocol.policy import PolicyLimits, PrivacyLimits, TrainingLimits
from ddm.protocol.receipt import Receipt
from ddm.protocol.submission import Waiver
from ddm.publishing.keys import load_key
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from silo.config import ImagesSettings, LedgerSettings, Policy, Site
from silo.data.declared import facts_of
from silo.images.source import ImageSource
from silo.plan.waiver import write_waiver
from silo.setup import SiteSetup, init_site, make_card, read_invitation
from silo.worker.state import State, state_path
from silo.worker.worker import Worker

PASSPHRASE = b"correct horse"
NUM_STEPS = 6
POLICY: dict[str, Any] = {
    "audit": {"required": True},
    "approval": {"kind": "policy", "carry_over": True},
}

ALL_PLANS = PolicyLimits(
    privacy=PrivacyLimits(unit="image", max_epsilon=1000.0),
    training=TrainingLimits(architectures=get_args(ArchitectureKind)),
)


def recipe(**changes: object) -> Recipe:
    """A recipe so small that an expert trains in a second, and draws noise; `changes` replace whole tables."""
    tables: dict[str, object] = {
        "rehearsal": True,
        "data": {"shape": [1, 4, 4], "range": [-1.0, 1.0]},
        "encoder": {"kind": "pca", "dim": 4},
        "clustering": {"num_fine": 8, "num_coarse": 2},
        "sketch": {"rank": 4},
        "partition": {"kind": "silo", "min_images": 10},
        "expert": {
            "architecture": {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2},
            "training": {
                "num_steps": NUM_STEPS,
                "batch_size": 8,
                "learning_rate": 0.002,
                "weight_decay": 0.01,
                "ema_decay": 0.9,
                "schedule": "constant",
                "precision": "fp32",
            },
        },
        "statistics": {
            "unit": "image",
            "total": {"epsilon": 8.0, "delta": 1e-5},
            "counts": {"epsilon": 1.0, "num_groups": 4},
            "sketch": {"epsilon": 7.0, "delta": 1e-5, "rank": 2},
        },
        "router": {"kind": "learned", "hidden": 8, "depth": 1, "num_steps": 20},
        "audit": {
            "required": True,
            "min_holdout_units": 300,
            "max_near_copy_rate": 0.01,
            "max_mia_auc": 0.6,
        },
        "limits": {
            "expert_bytes": 1 << 20,
            "statistic_bytes": 1 << 20,
            "train_s": 600,
            "gpu_hours": 1.0,
        },
    }
    return Recipe.model_validate_json(json.dumps(tables | changes))


def make_draft(
    federation: Federation,
    chosen: Recipe,
    public: Tensor | CarriedExperts,
    folder: Path,
    *,
    columns: PublicColumns | None = None,
) -> Draft:
    """Open what a recipe names, as `aggregator plan` does, and draft its plan; nothing is signed."""
    if isinstance(public, CarriedExperts):
        networks = open_networks_beside(chosen, public.plan)
    else:
        networks = open_networks(chosen)
    return draft_plan(federation, chosen, networks, public, folder, columns=columns)


def images(num: int, centre: float, seed: int) -> np.ndarray:
    """Made-up pictures around a grey level, with a bright or dark half."""
    rng = np.random.default_rng(seed)
    side = (
        np.where(rng.random((num, 1, 1, 1)) < 0.5 + centre / 2, 0.5, -0.5)
        * np.linspace(-1, 1, 4)[None, None, None]
    )
    return np.clip(centre * 0.3 + side + 0.15 * rng.standard_normal((num, 1, 4, 4)), -1, 1).astype(
        np.float32
    )


def cohort(num: int, centre: float, seed: int, *, patients: bool = False) -> dict[str, np.ndarray]:
    """Make what a silo's npz holds.

    Args:
        num: images.
        centre: the grey level that they are around, from -1 to 1.
        seed: of the noise.
        patients: whether each image has one.

    Returns:
        The images, the class of each (1 where its left side is the bright one), and the patients.
    """
    made = images(num, centre, seed)
    is_left_bright = made[..., 0].mean((1, 2)) > made[..., -1].mean((1, 2))
    arrays = {"images": made, "labels": is_left_bright.astype(np.int64)}
    if patients:
        # Two or three images each, and the images of a patient do not follow one another.
        owners = np.random.default_rng(seed).permutation(np.arange(num) * 2 // 5)
        arrays["patients"] = np.array([f"patient {owner}" for owner in owners])
    return arrays


def set_training(site: Site, **fields: object) -> None:
    """Set fields of the table [training] of a site's silo.toml."""
    settings = site.settings()
    training = settings.training.model_copy(update=fields)
    changed = settings.model_copy(update={"training": training})
    save_settings(changed, site.path / "silo.toml", "test")
    open_to_group(site.path / "silo.toml", site.path)


@dataclass(frozen=True)
class TinyFederation:
    """The operator's folder and the silos' sites, all below one folder."""

    path: Path
    federation: Federation
    sites: dict[str, Site]

    @classmethod
    def create(
        cls, path: Path, sizes: dict[str, int], *, patients: bool = False
    ) -> "TinyFederation":
        """Make the federation and enroll its silos; with `patients`, two or three images belong to each."""
        federation = Federation(path / "fed")
        settings = FederationSettings(name="tiny", host="127.0.0.1", port=9092, licence="CC-BY-4.0")
        init_federation(federation, settings, PASSPHRASE)
        tiny = cls(path, federation, {})
        for index, (silo_id, size) in enumerate(sizes.items()):
            tiny.join(silo_id, size, index, patients=patients)
        return tiny

    def join(self, silo_id: str, size: int, index: int, *, patients: bool = False) -> None:
        """Make the site of a silo and enroll it, before the first plan or late; `index` chooses its images."""
        data = self.path / f"{silo_id}.npz"
        np.savez(data, **cohort(size, index - 0.5, seed=index, patients=patients))  # type: ignore[arg-type]
        # At most one patient an image, so that the card bounds nothing that a test may ask for.
        self.join_with(silo_id, data, max_patients=size if patients else None)

    def join_with(
        self,
        silo_id: str,
        data: Path,
        policy: dict[str, object] | None = None,
        ledger: LedgerSettings | None = None,
        max_patients: int | None = None,
    ) -> None:
        """Make the site of a silo that has its own data, and enroll it."""
        site = Site(self.path / silo_id)
        invitation_path = self.federation.path / "invitation.json"
        invitation = read_invitation(invitation_path, sha256_file(invitation_path))
        setup = SiteSetup(
            silo_id,
            data,
            # Several decoders would take longer to start than these images to decode.
            images=ImagesSettings(processes=1),
            ledger=ledger or LedgerSettings(),
        )
        key = init_site(site, setup, invitation, PASSPHRASE)
        write_policy(site, policy or POLICY)
        make_card(site, key, patients=max_patients)
        # The card allows every plan, because tests give sites other policies afterwards.
        card = Card.parse(site.card_path.read_bytes(), subject="card.json").model_copy(
            update={"limits": ALL_PLANS}
        )
        (self.path / f"{silo_id}.card.json").write_bytes(seal(card.encode(), CARD_KIND, key))
        enroll_silo(self.federation, self.path / f"{silo_id}.card.json")
        self.sites[silo_id] = site

    @classmethod
    def open(cls, path: Path) -> "TinyFederation":
        """Return the one that was made in a folder."""
        sites = {file.parent.name: Site(file.parent) for file in sorted(path.glob("*/silo.toml"))}
        return cls(path, Federation(path / "fed"), sites)

    def copy(self, folder: Path) -> "TinyFederation":
        """Return the same in another folder, which a test may change."""
        shutil.copytree(self.path, folder)
        return TinyFederation(
            folder,
            Federation(folder / "fed"),
            {silo_id: Site(folder / silo_id) for silo_id in self.sites},
        )

    def current_plan_id(self) -> str:
        """Return the id of the plan in force."""
        plan, _ = self.federation.current_plan()
        return plan.plan_id

    @property
    def root(self) -> Path:
        """The pinned root."""
        return self.federation.tuf / "1.root.json"

    def sign(self, chosen: Recipe | None = None) -> str:
        """Sign a plan; return its id."""
        chosen = chosen or recipe()
        public = torch.from_numpy(
            np.concatenate([images(120, centre, seed=90) for centre in (-0.5, 0.5)])
        )
        scratch = self.path / "scratch"
        draft = make_draft(self.federation, chosen, public, scratch)
        sign_plan(self.federation, draft, PASSPHRASE)
        shutil.rmtree(scratch)
        return draft.plan.plan_id

    def grow(self, *, replaced: Sequence[str] = (), chosen: Recipe | None = None) -> str:
        """Sign a plan that carries over what the plan in force has; return its id."""
        plan, _ = self.federation.current_plan()
        carrying = choose_carried(self.federation, plan.plan_id, replaced)
        with tempfile.TemporaryDirectory() as scratch:
            draft = make_draft(self.federation, chosen or recipe(), carrying, Path(scratch))
            sign_plan(self.federation, draft, PASSPHRASE)
        return draft.plan.plan_id

    def take_part(self, silo_id: str, plan_id: str) -> None:
        """From the delivery of a plan to the silo's receipt."""
        self.deliver_plan(silo_id, plan_id)
        self.work(silo_id)
        self.collect(silo_id, plan_id)
        (receipt,) = self.take_in()
        if receipt.verdict.kind != "accepted":
            raise AssertionError(receipt.verdict)
        self.deliver_receipt(silo_id, plan_id)
        self.work(silo_id, until="accepted")

    def deliver_plan(self, silo_id: str, plan_id: str) -> None:
        """What the courier does with a plan; the silo's operator waives the audit for it."""
        bundle = self.sites[silo_id].inbox / plan_id / "bundle"
        shutil.copytree(self.federation.bundle(plan_id), bundle)
        waive(
            self.sites[silo_id],
            sha256_hex((bundle / "targets" / plan_id / "plan.json").read_bytes()),
        )

    def key(self, silo_id: str) -> SigningKey:
        """Open a silo's key."""
        return SigningKey.load(self.sites[silo_id].key_path, PASSPHRASE)

    def work(self, silo_id: str, until: str = "in_outbox") -> State:
        """Run the silo's worker, in this process, until it enters a state."""
        worker = Worker(self.sites[silo_id], self.key(silo_id), lambda state: None)
        worker.begin()
        while worker.state.state != until:
            before = worker.state
            worker.step()
            if worker.state == before:
                raise AssertionError(
                    f"{silo_id} stands still in state {before.state}: {before.problem}"
                )
        return worker.state

    def collect(self, silo_id: str, plan_id: str, sequence: int = 1) -> Path:
        """What the ServerApp does with a submission."""
        arrived = self.federation.incoming / plan_id / silo_id / str(sequence)
        shutil.copytree(self.sites[silo_id].outbox / plan_id / str(sequence), arrived)
        return arrived

    def take_in(self) -> list[Receipt]:
        """Run the intake desk once."""
        verdicts: list[Receipt] = []
        desk = IntakeService(
            self.federation, load_key(self.federation, "receipts", PASSPHRASE), verdicts.append
        )
        desk.step()
        return verdicts

    def deliver_receipt(self, silo_id: str, plan_id: str, sequence: int = 1) -> None:
        """What the courier does with a receipt."""
        source = self.federation.receipts / plan_id / silo_id / f"{sequence}.json"
        target = self.sites[silo_id].inbox / plan_id / "receipts" / f"{sequence}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def complete(self, out: Path, chosen: Recipe | None = None) -> str:
        """From the plan to the published release; return the plan's id."""
        plan_id = self.sign(chosen)
        for silo_id in self.sites:
            self.deliver_plan(silo_id, plan_id)
            self.work(silo_id)
            self.collect(silo_id, plan_id)
        verdicts = self.take_in()
        if {receipt.verdict.kind for receipt in verdicts} != {"accepted"}:
            raise AssertionError([receipt.verdict for receipt in verdicts])
        for silo_id in self.sites:
            self.deliver_receipt(silo_id, plan_id)
            self.work(silo_id, until="accepted")
        self.publish(out)
        return plan_id

    def publish(self, out: Path) -> None:
        """Train the router and publish the next version."""
        train_router(self.federation, take_inventory(self.federation), seed=0)
        self.publish_only(out)

    def publish_only(self, out: Path) -> None:
        """Publish with the router that is there."""
        publish(self.federation, PASSPHRASE, out, rehearsal=True, renew=True)

    def state_of(self, silo_id: str) -> State:
        """Read a silo's state from disk."""
        return State.parse(state_path(self.sites[silo_id].private).read_bytes(), subject="state")


class PlannedFederation(NamedTuple):
    """A federation whose plan is signed.

    Attributes:
        tiny: the federation.
        plan_id: of its plan.
    """

    tiny: TinyFederation
    plan_id: str

    def copy(self, folder: Path) -> "PlannedFederation":
        """Return the same in another folder, which a test may change."""
        return PlannedFederation(self.tiny.copy(folder), self.plan_id)


def waive(site: Site, plan_digest: str) -> None:
    """Waive an inconclusive audit of one plan, as `silo waive` does."""
    until = now_utc() + timedelta(days=30)
    terms: dict[str, Any] = {
        "plan_digest": plan_digest,
        "verdict": "inconclusive",
        "expires_at": until,
    }
    write_waiver(site, Waiver(role="test operator", reason="made-up images", **terms))


def declare(site: Site, policy: dict[str, object] = POLICY) -> None:
    """Let a site whose data are others by now declare them, and replace its policy."""
    facts = facts_of(ImageSource.of_site(site)).model_dump(exclude_none=True)
    write_policy(site, policy | {"data": facts})
    write_policy(site, policy)  # with the classes and captions that there are


def write_policy(site: Site, policy: dict[str, object]) -> None:
    """Replace a site's policy; what it declares of its data stays, and a waiver where the audit is that of `POLICY`.

    The classes of `cohort` are declared where there are labels, and captions where there are some.
    """
    data = site.policy().data
    if data.kind in ("arrays", "latents"):
        columns = open_arrays(Path(site.settings().data)).columns
        classes = data.classes
        if classes is None and "labels" in columns:
            classes = 2
        data = data.model_copy(update={"classes": classes, "captions": "captions" in columns})
    usual = {
        "privacy": {"unit": "image"},
        "training": {"min_images": 10},
        "plans": {"accept": "policy"},
    }
    parts = {name: terms | dict(policy.get(name, {})) for name, terms in usual.items()}  # type: ignore[call-overload]
    replaced = Policy.model_validate({"data": data.model_dump(exclude_none=True)} | policy | parts)
    if policy.get("audit") == POLICY["audit"]:
        audit = replaced.audit.model_copy(update={"waiver": site.policy().audit.waiver})
        replaced = replaced.model_copy(update={"audit": audit})
    save_settings(replaced, site.path / "policy.toml", "test")
