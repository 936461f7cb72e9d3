"""Measuring submitted experts on the federation's public images, once each; `intake.screening` has the rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aggregator.config import PUBLIC_NAME, Federation
from aggregator.intake.flags import Fault, remember_flags
from aggregator.intake.inventory import Inventory
from aggregator.intake.quarantine import is_admitted
from aggregator.intake.screening import (
    ExpertFigures,
    Probe,
    absolute_faults,
    copies,
    fresh_rms,
    num_images,
    relative_faults,
)
from aggregator.membership.registry import taking_part
from aggregator.membership.withdrawal import withdrawn_silos
from ddm.diffusion.path import path_named
from ddm.errors import RefusedError
from ddm.io.files import read_bounded, write_atomic
from ddm.models import training_flops
from ddm.models.streamed import StreamedExpert, stored_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, PlanId, SiloId, sha256_hex
from ddm.protocol.plan import ExpertObjective, Plan
from ddm.protocol.submission import Submission, SubmittedExpert, submission_path

_PLACES = 7  # significant digits kept of a loss


class ExpertExamination(Document):
    """What was measured of one expert: a file each, since a document holds only so many values."""

    format: Literal["archipelago/examination/2"] = "archipelago/examination/2"
    plan_id: PlanId
    silo_id: SiloId
    submission_digest: Digest
    expert: ExpertFigures


@dataclass(frozen=True)
class Examination:
    """What was measured of one submission's experts, in its order."""

    silo_id: str
    submission_digest: str
    experts: tuple[ExpertFigures, ...]


def public_images(
    federation: Federation, plan_id: str, part: Literal["fitted", "holdout"], *, seen: bool = True
) -> Tensor:
    """Return the public images that the plan was fitted on, or those held out, shape (N, ...).

    Args:
        federation: the operator's folder.
        plan_id: the plan.
        part: which.
        seen: as experts see them, latents perhaps; False for the images.
    """
    with np.load(federation.plan_folder(plan_id) / PUBLIC_NAME, allow_pickle=False) as archive:
        latents = f"{part}_latents"
        return torch.from_numpy(archive[latents if seen and latents in archive.files else part])


@dataclass(frozen=True)
class Examiner:
    """Measures experts, and keeps what it measured in `screening/`, by the submission's digest and the expert's id.

    Attributes:
        federation: the operator's folder.
        plan: the current plan.
    """

    federation: Federation
    plan: Plan

    @cached_property
    def _probes(self) -> dict[ExpertObjective, Probe]:
        return {}

    def probe(self, silo_id: str) -> Probe:
        """The public images as this silo's experts are asked about them: in terms of what they learnt."""
        learnt = self._learnt(silo_id)
        if learnt not in self._probes:
            self._probes[learnt] = self._probe(learnt)
        return self._probes[learnt]

    def _learnt(self, silo_id: str) -> ExpertObjective:
        """What a silo's experts learnt, without whose they are."""
        learnt = self.plan.objective.of(silo_id)
        return ExpertObjective(path=learnt.path, prediction=learnt.prediction)

    def _probe(self, learnt: ExpertObjective) -> Probe:
        shape = self.plan.expert_shape
        most = num_images(training_flops(self.plan.expert.architecture, shape, 1, self.plan.condition) / 3)
        mean = public_images(self.federation, self.plan.plan_id, "fitted").mean(0)
        images = public_images(self.federation, self.plan.plan_id, "holdout")[:most]
        return Probe.of(images, mean, path_named(learnt.path), learnt.prediction)

    @cached_property
    def _base_rms(self) -> dict[str, float]:
        """Root mean square of each weight of the public expert that training starts from, if there is one."""
        base, plan = self.plan.expert.base, self.plan
        if base is None:
            return {}
        path = self.federation.plan_targets(plan.plan_id) / base
        shape, most = plan.expert_shape, plan.file(base).bytes
        stored = stored_tensors(plan.expert.architecture, shape, path, most, plan.condition)
        return {name: each.root_mean_square() for name, each in stored.items()}

    def examine(self, silo_id: str, submission: Submission, digest: str, folder: Path) -> Examination:
        """Measure the experts of a verified submission, except those that were measured before.

        Args:
            silo_id: whose.
            submission: the document.
            digest: of the document.
            folder: holds the experts; nobody else writes there.
        """
        figures = tuple(self._examine_expert(silo_id, expert, digest, folder) for expert in submission.experts)
        return Examination(silo_id, digest, figures)

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
        """Say what is implausible of a submission, by itself and beside those of other silos; its flags are kept."""
        figures = {silo_id: each.experts for silo_id, each in accepted.items() if silo_id != new.silo_id}
        training, found = self.plan.expert.training, list[Fault]()
        for expert in new.experts:
            found += absolute_faults(expert, self.probe(new.silo_id), training) + copies(expert, figures, training)
        found += self._apart({**accepted, new.silo_id: new}).get(new.silo_id, [])
        return self._kept(new, found)

    def outliers(self, accepted: Mapping[str, Examination]) -> dict[str, list[str]]:
        """Say which accepted silos stand apart, now that later ones are there, and nobody admitted them as they are."""
        apart = self._apart(accepted)
        found = {silo_id: self._kept(accepted[silo_id], faults) for silo_id, faults in apart.items()}
        digests = {silo_id: accepted[silo_id].submission_digest for silo_id in found}
        return {silo_id: told for silo_id, told in found.items() if not is_admitted(self.federation, digests[silo_id])}

    def ratios(self, examination: Examination) -> dict[str, tuple[float, ...]]:
        """Return each expert's loss in each band as a multiple of that of answering 0."""
        silent_Z = self.probe(examination.silo_id).silent_Z
        return {each.expert_id: _rounded((each.loss_Z / silent_Z).tolist(), 3) for each in examination.experts}

    def _apart(self, examined: Mapping[str, Examination]) -> dict[str, list[Fault]]:
        """Compare experts that learnt the same; the losses of others are in other units."""
        found: dict[str, list[Fault]] = {}
        for learnt in {self._learnt(silo_id) for silo_id in examined}:
            found |= relative_faults({s: each.experts for s, each in examined.items() if self._learnt(s) == learnt})
        return found

    def _kept(self, examination: Examination, found: Sequence[Fault]) -> list[str]:
        """Keep the flags, and put the faults into words."""
        if found:
            remember_flags(self.federation, self.plan.plan_id, examination.submission_digest, found)
        return [str(fault) for fault in found]

    def _examine_expert(self, silo_id: str, expert: SubmittedExpert, digest: str, folder: Path) -> ExpertFigures:
        kept = self.federation.screening / self.plan.plan_id / digest / f"{expert.expert_id}.json"
        if kept.is_file():
            return ExpertExamination.parse(read_bounded(kept, MAX_DOCUMENT_BYTES), subject=kept.name).expert
        figures = self._figures(silo_id, folder, expert)
        examination = ExpertExamination(
            plan_id=self.plan.plan_id, silo_id=silo_id, submission_digest=digest, expert=figures
        )
        write_atomic(kept, examination.encode())
        return figures

    def _figures(self, silo_id: str, folder: Path, expert: SubmittedExpert) -> ExpertFigures:
        """Measure an expert as one without a class or a text: what it was told in training is nobody's to guess."""
        plan = self.plan
        architecture, shape, condition = plan.expert.architecture, plan.expert_shape, plan.condition
        stored = stored_tensors(architecture, shape, folder / expert.file.path, expert.file.bytes, condition)
        before = {
            name: max(fresh_rms(each.shape, architecture.kind), self._base_rms.get(name, 0.0))
            for name, each in stored.items()
        }
        excess = {name: each.root_mean_square() - before[name] for name, each in stored.items()}
        largest = max(excess, key=lambda name: excess[name])
        answer = StreamedExpert(architecture, shape, stored, condition)
        losses_ZN = self.probe(silo_id).losses(answer)
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


def _rounded(values: Sequence[float], places: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.{places}g}") for value in values)
