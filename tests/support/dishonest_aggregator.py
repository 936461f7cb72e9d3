"""An aggregator that holds every key of its federation and signs whatever it likes."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddm.encoders import PcaEncoder
from ddm.io.tensors import save_tensors
from ddm.partition.clustering import Clusters
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.routers.sketch import Sketch
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import sign_metadata
from ddm.trust.repository import Repository
from silo.config import Policy, Site
from silo.plan.acceptance import AcceptedPlan, receive_plan
from tests.support.documents import AGREED, base_document, plan_document, to_bytes
from tests.support.parsers import card_document
from tests.support.policies import ordinary_policy

SILO = "north"
RANK = 4
SIDE = 4
DELTA = 1e-5
ROLES = ("root", "targets", "online", "plans", "release", SILO)


def random_images(num: int, seed: int) -> Tensor:
    """Made-up images."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num, 1, SIDE, SIDE, generator=generator) / 3).clamp(-1, 1)


PUBLIC = random_images(3000, 0)


def clusters_around(images: Tensor) -> Clusters:
    """A group for each image, whose centroid lies exactly on it."""
    index_F = torch.arange(len(images))
    return Clusters(PcaEncoder.fit(PUBLIC, RANK).encode(images), torch.zeros_like(index_F), index_F)


@dataclass(frozen=True)
class UnsignedPlan:
    """A plan before it is signed; `spoil` what you like.

    Attributes:
        document: plan.json as it will stand there, except for the list of files.
        tensors: what the plan's files will hold, by name.
        contents: the bytes of files that are written as they are, by name.
    """

    document: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    contents: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def honest(cls, clusters: Clusters, **statistics: object) -> "UnsignedPlan":
        """A plan that any site would take."""
        num_groups = 1 + int(clusters.group_F.max())
        num_coarse = 1 + int(clusters.coarse_F.max())
        encoder = PcaEncoder.fit(PUBLIC, RANK)
        group_N = torch.arange(len(PUBLIC)) % num_groups
        document = plan_document(
            silos=[SILO],
            data={"shape": [1, SIDE, SIDE], "range": [-1.0, 1.0]},
            encoder={"kind": "pca", "path": "plan/encoder.safetensors", "dim": RANK},
            clustering={"num_fine": len(clusters.group_F), "num_coarse": num_coarse},
            sketch={"path": "plan/sketch.safetensors", "rank": RANK},
            router={"kind": "counts"},
        )
        document["statistics"] |= {
            "counts": {"epsilon": 1.0, "num_groups": num_groups},
            "sketch": {"epsilon": 7.0, "delta": DELTA, "rank": 2},
            **statistics,
        }
        sketch = Sketch.fit(PUBLIC, group_N, RANK, num_groups)
        parts: dict[str, PcaEncoder | Clusters | Sketch] = {
            "encoder": encoder,
            "centroids": clusters,
            "sketch": sketch,
        }
        return cls(document, {name: dict(part.tensors()) for name, part in parts.items()})

    def copy(self) -> "UnsignedPlan":
        """Return the same, to spoil in another way."""
        return replace(self, document=deepcopy(self.document), tensors=deepcopy(self.tensors))


@dataclass
class DishonestAggregator:
    """A federation in `folder` with one site, which pinned its root."""

    folder: Path
    keys: dict[str, SigningKey] = field(
        default_factory=lambda: {role: SigningKey.generate() for role in ROLES}
    )
    num_plans: int = 0

    def __post_init__(self) -> None:
        keys = self.keys
        online = Holders((keys["online"].public,))
        holders = {
            "root": Holders((keys["root"].public,)),
            "targets": Holders((keys["targets"].public,)),
            "snapshot": online,
            "timestamp": online,
        }
        targets = draft_targets(
            1, Delegates(keys["plans"].public, keys["release"].public), now_utc()
        )
        self.repository = Repository.create(
            self.folder / "tuf",
            root=sign_metadata(draft_root(1, holders, now_utc()), [keys["root"]]),
            targets=sign_metadata(targets, [keys["targets"]]),
            plans_key=keys["plans"],
            release_key=keys["release"],
            online_key=keys["online"],
            now=now_utc(),
        )
        self.site = Site(self.folder / SILO)
        self.site.make_folders()
        shutil.copyfile(self.folder / "tuf" / "1.root.json", self.site.root_path)
        self.site.card_path.write_bytes(to_bytes(card_document() | {"agreed": AGREED}))

    def deliver(
        self,
        plan: UnsignedPlan,
        plan_id: str | None = None,
        rewrite: Callable[[bytes], bytes] = bytes,
    ) -> str:
        """Sign a plan and lay its bundle into the site's inbox, as the site's courier does.

        Args:
            plan: what is signed.
            plan_id: of the plan; a new one by default.
            rewrite: changes the bytes of plan.json before they are signed.

        Returns:
            The plan's id.
        """
        self.num_plans += 1
        plan_id = plan_id or f"digits-{self.num_plans:08x}"
        bundle = self.site.inbox / plan_id / "bundle"
        shutil.rmtree(bundle, ignore_errors=True)
        home = bundle / "targets" / plan_id
        (home / "plan").mkdir(parents=True)
        files = []
        for name, tensors in plan.tensors.items():
            path = f"plan/{name}.safetensors"
            save_tensors(home / path, tensors)
            files.append(File.of(path, home / path))
        for name, content in plan.contents.items():
            path = f"plan/{name}.safetensors"
            (home / path).write_bytes(content)
            files.append(File.of(path, home / path))
        digests = {file.path: file.digest for file in files}
        document = plan.document | {
            "root_digest": self.repository.root_digest,
            "plan_id": plan_id,
            "files": [file.model_dump() for file in files],
        }
        if "plan/base.safetensors" in digests:
            document["base"] = base_document(digests["plan/base.safetensors"])
        encoded = rewrite(to_bytes(document))
        (home / "plan.json").write_bytes(encoded)
        listed = {f"{plan_id}/{file.path}": (file.bytes, file.digest) for file in files}
        silos = {SILO: self.keys[SILO].public}
        delegates = Delegates(
            self.keys["plans"].public, self.keys["release"].public, plan_id, silos
        )
        self.repository.start_plan(
            plan_id,
            listed | {f"{plan_id}/plan.json": (len(encoded), sha256_hex(encoded))},
            targets=sign_metadata(
                self.repository.next_targets(delegates, now_utc()), [self.keys["targets"]]
            ),
            plans_key=self.keys["plans"],
            release_key=self.keys["release"],
            online_key=self.keys["online"],
            now=now_utc(),
        )
        self.repository.export_bundle(bundle)
        return plan_id

    def offer(
        self, plan: UnsignedPlan, policy: Policy | None = None, plan_id: str | None = None
    ) -> AcceptedPlan:
        """Deliver a plan and return what the site's worker makes of it."""
        return self.receive(self.deliver(plan, plan_id), policy)

    def receive(self, plan_id: str, policy: Policy | None = None) -> AcceptedPlan:
        """Run the worker's own code on what lies in its inbox.

        Args:
            plan_id: of a plan that was delivered.
            policy: the site's; what it leaves open allows the plan, so that a refusal is that of the rule under test.
        """
        plan_path = self.site.inbox / plan_id / f"bundle/targets/{plan_id}/plan.json"
        shape = (1, 8, 8)
        # An attack may have left no plan that can be read; the worker refuses it whatever the policy declares.
        with suppress(ValueError, KeyError, TypeError, OSError):
            shape = tuple(json.loads(plan_path.read_bytes())["data"]["shape"])
        policy = ordinary_policy(policy, shape)
        key = self.keys[SILO].public
        return receive_plan(
            self.site, plan_id, policy, silo_id=SILO, key=key, max_bytes=1 << 28, now=now_utc()
        )
