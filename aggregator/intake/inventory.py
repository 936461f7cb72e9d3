"""Reads back everything that was accepted for the current plan, as strictly as intake did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.claims import CountedUnits, counted_units
from aggregator.intake.flags import Flags, flags_of
from aggregator.intake.quarantine import is_admitted
from aggregator.membership.registry import card_of, member_cards, signing_key
from aggregator.membership.withdrawal import withdrawn_silos
from ddm.errors import DigestError, ReplayError, SetupError
from ddm.io.files import read_bounded
from ddm.io.tensors import load_tensors
from ddm.loading.plan import PlanFiles
from ddm.partition.layout import Layout, silo_parts
from ddm.protocol.base import MAX_DOCUMENT_BYTES, now_utc, sha256_hex
from ddm.protocol.manifest import Flag
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import StatisticKind
from ddm.protocol.submission import Submission, submission_path
from ddm.statistics.of_plan import statistics_of
from ddm.statistics.sketch import sketch_noise_level
from ddm.trust.silo_role import verify_silo_metadata


@dataclass(frozen=True)
class AcceptedSilo:
    """One silo's accepted submission.

    Attributes:
        submission: the parsed document.
        document: its bytes as signed.
        folder: every file as received; the document lists their digests.
        role: the signed metadata, verbatim.
        counted: how many units its prior counts.
        admitted: whether a person admitted it although screening found it implausible.
        flags: the screening rules that its experts broke, by expert.
    """

    submission: Submission
    document: bytes
    folder: Path
    role: bytes
    counted: CountedUnits
    admitted: bool = False
    flags: Flags = field(default_factory=dict)

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
        silos: accepted submissions by silo id, sorted; their experts in this order are the router's classes.
        missing: silos of the plan without an accepted submission.
        withdrawn: silos that were removed from the plan, or from the federation.
    """

    plan: Plan
    plan_digest: str
    files: PlanFiles
    silos: Mapping[str, AcceptedSilo]
    missing: tuple[str, ...]
    withdrawn: tuple[str, ...] = ()

    @property
    def num_units(self) -> Mapping[str, int]:
        """The number of units that each silo stated, of which its statistics are."""
        return {silo_id: silo.submission.num_units for silo_id, silo in self.silos.items()}

    @property
    def counted_units(self) -> Mapping[str, int]:
        """The number of units that each silo counts as, beside the others: its own, or a lower one."""
        return {silo_id: silo.counted.units for silo_id, silo in self.silos.items()}

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each silo's submission."""
        return {silo_id: silo.digest for silo_id, silo in self.silos.items()}

    def counts(self) -> Mapping[str, Tensor]:
        """Each silo's noised histogram, shape (G,), int64."""
        return {silo_id: tensors["counts"] for silo_id, tensors in self.statistic("counts").items()}

    def class_counts(self) -> Mapping[str, Tensor]:
        """Each silo's noised histogram over classes and groups, shape (C, G), int64; empty if the plan has none."""
        return {
            silo_id: tensors["counts"]
            for silo_id, tensors in self.statistic("class_counts").items()
        }

    def sketches(self) -> Mapping[str, Tensor]:
        """Each silo's noised sketches, shape (n_k, R), float32; empty if the plan has none."""
        return {silo_id: tensors["sketch"] for silo_id, tensors in self.statistic("sketch").items()}

    def t_release(self) -> float | None:
        """The noise level of the sketches, None if the plan has none."""
        return sketch_noise_level(self.plan, self.files.sketch)

    def layout(self) -> Layout:
        """Every silo's experts, derived from its noised histogram, in the order of the manifest and of the router."""
        partition = self.plan.partition
        clusters = self.files.clusters
        parts_of_silos = [
            silo_parts(partition, silo_id, clusters, noisy_G)
            for silo_id, noisy_G in self.counts().items()
        ]
        return Layout.of(partition, parts_of_silos)

    def statistic(self, kind: StatisticKind) -> Mapping[str, Mapping[str, Tensor]]:
        """Read the tensors of one statistic of each silo; empty if the plan does not require it."""
        statistic = statistics_of(self.plan.statistics).get(kind)
        if statistic is None:
            return {}
        tensors: dict[str, Mapping[str, Tensor]] = {}
        for silo_id, silo in self.silos.items():
            listed = {submitted.kind: submitted.file for submitted in silo.submission.statistics}
            file = listed[kind]
            specs = statistic.tensor_specs(silo.submission.num_units)
            tensors[silo_id] = load_tensors(
                silo.folder / file.path, specs, max_bytes=file.bytes, digest=file.digest
            )
        return tensors


def take_inventory(federation: Federation) -> Inventory:
    """Read what was accepted for the current plan.

    Raises:
        SetupError: nothing was accepted yet.
        TrustError: a document or a role is no longer what its silo signed.
    """
    plan, digest = federation.current_plan()
    withdrawn = withdrawn_silos(federation, plan)
    remaining = [silo_id for silo_id in member_cards(federation, plan) if silo_id not in withdrawn]
    # The folder of a silo appears by a rename once intake has accepted its submission.
    present = [
        silo_id for silo_id in remaining if federation.accepted_folder(plan, silo_id).is_dir()
    ]
    if not present:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="at least one accepted submission",
            got=f"none of {len(remaining)} silos",
            remedy="Run `aggregator run` until silos have answered; `aggregator status` shows why one was refused.",
        )
    return Inventory(
        plan=plan,
        plan_digest=digest,
        files=PlanFiles.load(plan, federation.plan_targets(plan.plan_id)),
        silos={silo_id: _read_silo(federation, plan, digest, silo_id) for silo_id in present},
        missing=tuple(silo_id for silo_id in remaining if silo_id not in present),
        withdrawn=tuple(silo_id for silo_id in plan.members if silo_id not in remaining),
    )


def _read_silo(federation: Federation, plan: Plan, plan_digest: str, silo_id: str) -> AcceptedSilo:
    """Read a submission back and verify it: its role by the silo's key, its document by the role, plan and size."""
    # A carried submission was signed for an earlier plan, whose digest the present plan names.
    carried = next((entry for entry in plan.carried if entry.silo_id == silo_id), None)
    if carried is not None:
        plan_digest = carried.plan_digest
    plan_id = plan.origin(silo_id)
    folder = federation.accepted_folder(plan, silo_id)
    name = submission_path(silo_id)
    # Verified again, although intake did so: a disk, a restored backup or a person may have changed what lies here.
    role = read_bounded(folder / "metadata" / f"{plan_id}.{silo_id}.json", MAX_DOCUMENT_BYTES)
    key = signing_key(card_of(federation, silo_id))
    signed = verify_silo_metadata(role, plan_id=plan_id, silo_id=silo_id, key=key, now=now_utc())

    document = read_bounded(folder / name, MAX_DOCUMENT_BYTES)
    digest = sha256_hex(document)
    signed_size, signed_digest = signed[f"{plan_id}/{name}"]
    if len(document) != signed_size or digest != signed_digest:
        raise DigestError(
            f"accepted {name}",
            expected=f"the document that the silo's role lists, {signed_size} bytes, sha256 {signed_digest}",
            got=f"{len(document)} bytes, sha256 {digest}",
        )
    if carried is not None and digest != carried.submission_digest:
        raise DigestError(
            f"accepted {name}",
            expected=f"the submission that the plan carries over, sha256 {carried.submission_digest}",
            got=f"sha256 {digest}",
        )
    submission = Submission.parse(document, subject=f"submission of {silo_id}")
    stated = (submission.plan_id, submission.plan_digest, submission.silo_id)
    if stated != (plan_id, plan_digest, silo_id):
        raise ReplayError(
            f"accepted submission of {silo_id}",
            expected=f"silo {silo_id} and plan {plan_id} with digest {plan_digest}",
            got=f"silo {submission.silo_id} and plan {submission.plan_id} with digest {submission.plan_digest}",
        )
    admitted = is_admitted(federation, digest)
    flags: Flags = {}
    if admitted:
        # A carried submission may have been flagged for its own plan, and for this one beside other experts.
        flags = _flags_of_plans(federation, sorted({plan_id, plan.plan_id}), digest)
    return AcceptedSilo(
        submission=submission,
        document=document,
        folder=folder,
        role=role,
        counted=counted_units(federation, plan, silo_id, digest, submission.num_units),
        admitted=admitted,
        flags=flags,
    )


def _flags_of_plans(federation: Federation, plan_ids: Sequence[str], digest: str) -> Flags:
    """Return the rules by which a submission's experts were flagged for any of these plans."""
    flags_of_experts: dict[str, set[Flag]] = {}
    for plan_id in plan_ids:
        for expert_id, flags in flags_of(federation, plan_id, digest).items():
            flags_of_experts.setdefault(expert_id, set()).update(flags)
    return {expert_id: tuple(sorted(flags)) for expert_id, flags in flags_of_experts.items()}
