"""What was accepted for the current plan, read back with the same strictness as at intake."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.files import read_bounded
from ddm.plan_files import PlanFiles
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission
from ddm.routers.counts import counts_specs
from ddm.sketch import sketch_release_specs
from ddm.tensors import load_tensors


@dataclass(frozen=True)
class AcceptedSilo:
    """One silo's accepted submission.

    Attributes:
        submission: the parsed document.
        document: its bytes as signed.
        folder: every file as received.
        role: the signed metadata, verbatim.
    """

    submission: Submission
    document: bytes
    folder: Path
    role: bytes

    @property
    def digest(self) -> str:
        """sha256 of the document."""
        return sha256_hex(self.document)


@dataclass(frozen=True)
class Inventory:
    """Everything the aggregator holds for one plan.

    Attributes:
        plan: the current plan.
        plan_digest: its digest.
        files: the plan's public tensors.
        silos: accepted submissions by silo id, sorted; their order is the router's class order.
        missing: silos of the plan without an accepted submission.
    """

    plan: Plan
    plan_digest: str
    files: PlanFiles
    silos: Mapping[str, AcceptedSilo]
    missing: tuple[str, ...]

    @property
    def num_units(self) -> Mapping[str, int]:
        """The public number of units of each silo."""
        return {silo_id: silo.submission.num_units for silo_id, silo in self.silos.items()}

    @property
    def prior(self) -> tuple[float, ...]:
        """pi: each expert's share of all images."""
        total = sum(self.num_units.values())
        return tuple(number / total for number in self.num_units.values())

    def counts(self) -> Mapping[str, Tensor]:
        """Each silo's noised histogram, shape (G,), int64."""
        return {silo_id: self._release(silo, "counts", "counts") for silo_id, silo in self.silos.items()}

    def sketches(self) -> Mapping[str, Tensor]:
        """Each silo's noised sketches, shape (n_k, R), float32."""
        return {silo_id: self._release(silo, "sketch", "sketch") for silo_id, silo in self.silos.items()}

    def t_release(self) -> float:
        """The noise level of the sketches."""
        submission = next(iter(self.silos.values())).submission
        return next(release.t_release for release in submission.releases if release.kind == "sketch")

    def _release(self, silo: AcceptedSilo, kind: str, tensor: str) -> Tensor:
        release = next(release for release in silo.submission.releases if release.kind == kind)
        if kind == "counts":
            specs = counts_specs(self.plan)
        else:
            specs = sketch_release_specs(self.plan, silo.submission.num_units)
        return load_tensors(silo.folder / release.file.path, specs, max_bytes=release.file.bytes)[tensor]


def take_inventory(federation: Federation) -> Inventory:
    """Read what was accepted for the current plan.

    Raises:
        SetupError: nothing was accepted yet.
    """
    plan, digest = federation.current_plan()
    accepted = federation.accepted / plan.plan_id
    present = [silo_id for silo_id in plan.silos if (accepted / silo_id).is_dir()]
    if not present:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="accepted submissions",
            got="none",
            remedy="Let `aggregator run` take some in; a refusal's reason stands in receipts/.",
        )
    return Inventory(
        plan=plan,
        plan_digest=digest,
        files=PlanFiles.load(plan, federation.plan_targets(plan.plan_id)),
        silos={silo_id: _read_silo(accepted / silo_id, plan.plan_id, silo_id) for silo_id in present},
        missing=tuple(silo_id for silo_id in plan.silos if silo_id not in present),
    )


def _read_silo(folder: Path, plan_id: str, silo_id: str) -> AcceptedSilo:
    document = read_bounded(folder / "silos" / silo_id / "submission.json", MAX_DOCUMENT_BYTES)
    role = read_bounded(folder / "metadata" / f"{plan_id}.{silo_id}.json", MAX_DOCUMENT_BYTES)
    submission = Submission.parse(document, subject=f"submission of {silo_id}")
    return AcceptedSilo(submission=submission, document=document, folder=folder, role=role)
