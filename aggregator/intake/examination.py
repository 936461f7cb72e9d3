"""Measuring submitted experts on the federation's public images, once each; `intake.screening` has the rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.inventory import Inventory
from aggregator.intake.quarantine import Decision, decision_on
from aggregator.intake.screening import (
    ExpertFigures,
    Probe,
    absolute_faults,
    copies,
    fresh_rms,
    num_images,
    relative_faults,
)
from aggregator.planning import PUBLIC_NAME
from aggregator.registry import taking_part
from aggregator.release.withdrawal import withdrawn_silos
from ddm.errors import RefusedError
from ddm.files import read_bounded, write_atomic
from ddm.models import training_flops
from ddm.models.streamed import StreamedExpert, stored_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, PlanId, SiloId, sha256_hex
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, SubmittedExpert, submission_path
from ddm.schedule import path_named

_PLACES = 7  # significant digits kept of a loss


class Examination(Document):
    """What was measured of one submission's experts."""

    format: Literal["archipelago/examination/1"] = "archipelago/examination/1"
    plan_id: PlanId
    silo_id: SiloId
    submission_digest: Digest
    experts: tuple[ExpertFigures, ...]


def public_images(federation: Federation, plan_id: str, part: Literal["fitted", "holdout"]) -> Tensor:
    """Return the public images that the plan was fitted on, or those held out, shape (N, C, H, W)."""
    with np.load(federation.plan_folder(plan_id) / PUBLIC_NAME, allow_pickle=False) as archive:
        return torch.from_numpy(archive[part])


@dataclass(frozen=True)
class Examiner:
    """Measures experts, and keeps what it measured in `screening/`, by the submission's digest.

    Attributes:
        federation: the operator's folder.
        plan: the current plan.
    """

    federation: Federation
    plan: Plan

    @cached_property
    def probe(self) -> Probe:
        """The public images as every expert is asked about them."""
        shape = self.plan.data.shape
        most = num_images(training_flops(self.plan.expert.architecture, shape, 1) / 3)
        mean = public_images(self.federation, self.plan.plan_id, "fitted").mean(0)
        images = public_images(self.federation, self.plan.plan_id, "holdout")[:most]
        return Probe.of(images, mean, path_named(self.plan.objective.path))

    def examine(self, silo_id: str, submission: Submission, digest: str, folder: Path) -> Examination:
        """Measure the experts of a verified submission, or return what was measured before.

        Args:
            silo_id: whose.
            submission: the document.
            digest: of the document.
            folder: holds the experts; nobody else writes there.
        """
        kept = self.federation.path / "screening" / self.plan.plan_id / f"{digest}.json"
        if kept.is_file():
            return Examination.parse(kept.read_bytes(), subject=kept.name)
        examination = Examination(
            plan_id=self.plan.plan_id,
            silo_id=silo_id,
            submission_digest=digest,
            experts=tuple(self._figures(folder, expert) for expert in submission.experts),
        )
        write_atomic(kept, examination.encode())
        return examination

    def accepted(self) -> dict[str, Examination]:
        """Measure what was accepted, by silo."""
        accepted = self.federation.accepted / self.plan.plan_id
        gone = withdrawn_silos(self.federation, self.plan)
        taking = [silo_id for silo_id in taking_part(self.federation, self.plan) if silo_id not in gone]
        present = [silo_id for silo_id in taking if (accepted / silo_id).is_dir()]
        found = {}
        for silo_id in present:
            document = read_bounded(accepted / silo_id / submission_path(silo_id), MAX_DOCUMENT_BYTES)
            submission = Submission.parse(document, subject=f"submission of {silo_id}")
            found[silo_id] = self.examine(silo_id, submission, sha256_hex(document), accepted / silo_id)
        return found

    def faults(self, new: Examination, accepted: Mapping[str, Examination]) -> list[str]:
        """Say what is implausible of a submission, by itself and beside those of other silos."""
        figures = {silo_id: each.experts for silo_id, each in accepted.items() if silo_id != new.silo_id}
        training, found = self.plan.expert.training, list[str]()
        for expert in new.experts:
            found += absolute_faults(expert, self.probe, training) + copies(expert, figures, training)
        return found + relative_faults({**figures, new.silo_id: new.experts}).get(new.silo_id, [])

    def outliers(self, accepted: Mapping[str, Examination]) -> dict[str, list[str]]:
        """Say which accepted silos stand apart, now that later ones are there, and nobody admitted them as they are."""
        found = relative_faults({silo_id: each.experts for silo_id, each in accepted.items()})
        decided = {silo_id: decision_on(self.federation, accepted[silo_id].submission_digest) for silo_id in found}
        return {silo_id: faults for silo_id, faults in found.items() if not _admitted(decided[silo_id])}

    def ratios(self, examination: Examination) -> dict[str, tuple[float, ...]]:
        """Return each expert's loss in each band as a multiple of that of answering 0."""
        silent_Z = self.probe.silent_Z
        return {each.expert_id: _rounded((each.loss_Z / silent_Z).tolist(), 3) for each in examination.experts}

    def _figures(self, folder: Path, expert: SubmittedExpert) -> ExpertFigures:
        architecture, shape = self.plan.expert.architecture, self.plan.data.shape
        stored = stored_tensors(architecture, shape, folder / expert.file.path, expert.file.bytes)
        excess = {name: each.root_mean_square() - fresh_rms(each.shape) for name, each in stored.items()}
        largest = max(excess, key=lambda name: excess[name])
        losses_ZN = self.probe.losses(StreamedExpert(architecture, shape, stored))
        return ExpertFigures(
            expert_id=expert.expert_id,
            digest=expert.file.digest,
            losses=tuple(_rounded(loss_N.tolist(), _PLACES) for loss_N in losses_ZN),
            excess_rms=excess[largest],
            excess_tensor=largest,
        )


def refuse_outliers(federation: Federation, inventory: Inventory) -> None:
    """Compare all accepted experts with each other once more, before anything is made of them.

    Raises:
        RefusedError: one stands apart from the others, and nobody has admitted it.
    """
    examiner = Examiner(federation, inventory.plan)
    silos = inventory.silos.items()
    found = examiner.outliers(
        {name: examiner.examine(name, silo.submission, silo.digest, silo.folder) for name, silo in silos}
    )
    if found:
        raise RefusedError(
            "accepted experts",
            expected="none that stands apart from the others, unless a person admitted it",
            got="; ".join(f"{silo_id}: {faults[0]}" for silo_id, faults in found.items())[:1000],
            remedy=f"Look: aggregator quarantine {federation.path}. Then for each silo: aggregator admit "
            f"{federation.path} SILO --reason TEXT, or aggregator withdraw.",
        )


def _admitted(decision: Decision | None) -> bool:
    return decision is not None and decision.verdict == "admitted"


def _rounded(values: Sequence[float], places: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.{places}g}") for value in values)
