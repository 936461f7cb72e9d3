"""Measures submitted experts on the federation's public images, each once; `intake.screening` has the rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aggregator.config import PUBLIC_NAME, Federation
from aggregator.intake.drawn import Gallery, PublicSet, most_public
from aggregator.intake.flags import Fault, remember_flags
from aggregator.intake.inventory import Inventory
from aggregator.intake.quarantine import is_admitted, refused_before
from aggregator.intake.screening import (
    ExpertFigures,
    Probe,
    absolute_faults,
    copies,
    fresh_rms,
    relative_faults,
)
from aggregator.intake.secret import load_screening_secret
from aggregator.intake.trial import Trial
from aggregator.membership.registry import members
from aggregator.membership.withdrawal import withdrawn_silos
from ddm.diffusion.path import path_named
from ddm.errors import RefusedError
from ddm.io.files import read_bounded, write_atomic
from ddm.loading.plan import PlanFiles
from ddm.models import training_flops
from ddm.models.streamed import StreamedExpert, stored_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, PlanId, SiloId, sha256_hex
from ddm.protocol.learning import ExpertObjective, OwnAdaptation
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, SubmittedExpert, expert_path, submission_path

PUBLIC_PARTS: tuple[Literal["holdout", "fitted"], ...] = ("holdout", "fitted")
_PLACES = 7  # significant digits kept of a loss


class ExpertExamination(Document):
    """The measurements of one expert, in a file of its own, since a document holds a limited number of values."""

    format: Literal["archipelago/examination/1"] = "archipelago/examination/1"
    plan_id: PlanId
    silo_id: SiloId
    submission_digest: Digest
    expert: ExpertFigures


@dataclass(frozen=True)
class Examination:
    """The measurements of one submission's experts, in its order."""

    silo_id: str
    submission_digest: str
    experts: tuple[ExpertFigures, ...]


def public_images(
    federation: Federation,
    plan_id: str,
    part: Literal["fitted", "holdout"],
    *,
    as_latents: bool = True,
) -> Tensor:
    """Return the public images that the plan was fitted on, or those held out, shape (N, ...).

    Args:
        federation: the operator's folder.
        plan_id: the plan.
        part: which.
        as_latents: return latents where the plan's experts work on latents; False for the images.
    """
    with np.load(federation.plan_folder(plan_id) / PUBLIC_NAME, allow_pickle=False) as archive:
        latents = f"{part}_latents"
        return torch.from_numpy(
            archive[latents if as_latents and latents in archive.files else part]
        )


@dataclass(frozen=True)
class Examiner:
    """Measures experts and stores the measurements in `screening/`, by submission digest and expert id.

    Attributes:
        federation: the operator's folder.
        plan: the current plan.
        on_expert: called before each expert that is measured.
    """

    federation: Federation
    plan: Plan
    on_expert: Callable[[], None] = lambda: None

    @cached_property
    def _trials(self) -> dict[ExpertObjective, Trial]:
        return {}

    def trial(self, silo_id: str) -> Trial:
        """What this silo's experts are tested with, by their training objective."""
        objective = self._objective(silo_id)
        if objective not in self._trials:
            self._trials[objective] = self._trial(objective)
        return self._trials[objective]

    def probe(self, silo_id: str) -> Probe:
        """The noised public images and targets for this silo's experts."""
        return self.trial(silo_id).probe

    def _objective(self, silo_id: str) -> ExpertObjective:
        """Return the training objective of a silo's experts, without the silo's name."""
        objective = self.plan.objective.of(silo_id)
        return ExpertObjective(path=objective.path, prediction=objective.prediction)

    def _trial(self, objective: ExpertObjective) -> Trial:
        plan, plan_id = self.plan, self.plan.plan_id
        images = public_images(self.federation, plan_id, "holdout")
        return Trial(
            secret=load_screening_secret(self.federation),
            plan_id=plan_id,
            objective=objective,
            canonical=path_named(plan.objective.ensemble_path),
            condition=plan.condition,
            images=images[: most_public(images[0].numel())].clone(),
            mean=public_images(self.federation, plan_id, "fitted").mean(0),
            gallery=self._gallery,
            forward_flops=training_flops(
                plan.expert.architecture, plan.expert_shape, 1, plan.condition
            )
            / 3,
        )

    @cached_property
    def _gallery(self) -> Gallery:
        """The public images to hold drawn ones to, held-out ones first."""
        plan, files = (
            self.plan,
            PlanFiles.load(self.plan, self.federation.plan_targets(self.plan.plan_id)),
        )

        def some(as_latents: bool) -> Tensor:
            parts = [
                public_images(self.federation, plan.plan_id, part, as_latents=as_latents)
                for part in PUBLIC_PARTS
            ]
            most = most_public(parts[0][0].numel())
            return torch.cat([part[:most] for part in parts])[:most].clone()

        def encode(seen: Tensor) -> Tensor:
            return files.encoder.encode(files.latent.decode(seen))

        features = files.encoder.encode(some(as_latents=False))
        return Gallery(PublicSet(some(as_latents=True).flatten(1)), PublicSet(features), encode)

    def _base_rms(self, silo_id: str, expert_id: str) -> dict[str, float]:
        """Root mean square of each weight of the expert that training starts from, if there is one."""
        plan, adaptation = self.plan, self.plan.expert.adaptation
        if plan.expert.base is not None:
            path, most = (
                self.federation.plan_targets(plan.plan_id) / plan.expert.base,
                plan.file(plan.expert.base).bytes,
            )
        elif isinstance(adaptation, OwnAdaptation) and silo_id in adaptation.submissions:
            path = (
                self.federation.accepted
                / adaptation.plan_id
                / silo_id
                / expert_path(silo_id, expert_id)
            )
            if not path.is_file():  # withdrawn since: a person looks at what stands out
                return {}
            most = path.stat().st_size
        else:
            return {}
        stored = stored_tensors(
            plan.expert.architecture, plan.expert_shape, path, most, plan.condition
        )
        return {name: each.root_mean_square() for name, each in stored.items()}

    def examine(
        self, silo_id: str, submission: Submission, digest: str, folder: Path
    ) -> Examination:
        """Measure the experts of a verified submission, except those that were measured before.

        Args:
            silo_id: whose.
            submission: the document.
            digest: of the document.
            folder: holds the experts; no other process writes there.
        """
        figures = tuple(
            self._examine_expert(silo_id, expert, digest, folder) for expert in submission.experts
        )
        return Examination(silo_id, digest, figures)

    def accepted(self) -> dict[str, Examination]:
        """Measure the experts of every accepted submission, by silo."""
        gone = withdrawn_silos(self.federation, self.plan)
        remaining = [
            silo_id for silo_id in members(self.federation, self.plan) if silo_id not in gone
        ]
        found = {}
        for silo_id in remaining:
            folder = self.federation.accepted_folder(self.plan, silo_id)
            if folder.is_dir():
                document = read_bounded(folder / submission_path(silo_id), MAX_DOCUMENT_BYTES)
                submission = Submission.parse(document, subject=f"submission of {silo_id}")
                found[silo_id] = self.examine(silo_id, submission, sha256_hex(document), folder)
        return found

    def faults(self, new: Examination, accepted: Mapping[str, Examination]) -> list[str]:
        """Describe what is implausible about a submission, alone and beside other silos', and store its flags."""
        figures = {
            silo_id: each.experts for silo_id, each in accepted.items() if silo_id != new.silo_id
        }
        training, found = self.plan.expert.training, list[Fault]()
        for expert in new.experts:
            probe, rehearsal = self.probe(new.silo_id), self.plan.rehearsal
            found += absolute_faults(expert, probe, training, rehearsal=rehearsal) + copies(
                expert, figures, training
            )
        found += self._apart({**accepted, new.silo_id: new}).get(new.silo_id, [])
        if refused_before(self.federation, self.plan.plan_id, new.silo_id):
            words = " comes after a submission of this silo that was flagged and refused: compare the two"
            found += [
                Fault(expert_id=each.expert_id, flag="refused_before", words=words)
                for each in new.experts
            ]
        return self._kept(new, found)

    def outliers(self, accepted: Mapping[str, Examination]) -> dict[str, list[str]]:
        """Describe which accepted silos stand apart now that later ones are there, except those admitted for it."""
        apart = self._apart(accepted)
        found = {
            silo_id: self._kept(accepted[silo_id], faults) for silo_id, faults in apart.items()
        }
        digests = {silo_id: accepted[silo_id].submission_digest for silo_id in found}
        return {
            silo_id: text
            for silo_id, text in found.items()
            if not is_admitted(self.federation, digests[silo_id], "stands_apart")
        }

    def ratios(self, examination: Examination) -> dict[str, tuple[float, ...]]:
        """Return each expert's loss in each band as a multiple of that of answering 0."""
        silent_Z = self.probe(examination.silo_id).silent_Z
        return {
            each.expert_id: _rounded((each.loss_Z / silent_Z).tolist(), 3)
            for each in examination.experts
        }

    def _apart(self, examined: Mapping[str, Examination]) -> dict[str, list[Fault]]:
        """Compare experts with the same objective; losses of different objectives are in different units."""
        found: dict[str, list[Fault]] = {}
        for objective in {self._objective(silo_id) for silo_id in examined}:
            found |= relative_faults(
                {s: e.experts for s, e in examined.items() if self._objective(s) == objective}
            )
        return found

    def _kept(self, examination: Examination, found: Sequence[Fault]) -> list[str]:
        """Store the flags and return the faults in words."""
        if found:
            remember_flags(self.federation, self.plan.plan_id, examination.submission_digest, found)
        return [str(fault) for fault in found]

    def _examine_expert(
        self, silo_id: str, expert: SubmittedExpert, digest: str, folder: Path
    ) -> ExpertFigures:
        kept = self.federation.screening / self.plan.plan_id / digest / f"{expert.expert_id}.json"
        if kept.is_file():
            return ExpertExamination.parse(
                read_bounded(kept, MAX_DOCUMENT_BYTES), subject=kept.name
            ).expert
        self.on_expert()
        figures = self._figures(silo_id, folder, expert, digest)
        examination = ExpertExamination(
            plan_id=self.plan.plan_id, silo_id=silo_id, submission_digest=digest, expert=figures
        )
        write_atomic(kept, examination.encode())
        return figures

    def _figures(
        self, silo_id: str, folder: Path, expert: SubmittedExpert, digest: str
    ) -> ExpertFigures:
        plan = self.plan
        architecture, shape, condition = plan.expert.architecture, plan.expert_shape, plan.condition
        stored = stored_tensors(
            architecture, shape, folder / expert.file.path, expert.file.bytes, condition
        )
        base = self._base_rms(silo_id, expert.expert_id)
        before = {
            name: max(fresh_rms(each.shape, architecture.kind), base.get(name, 0.0))
            for name, each in stored.items()
        }
        excess = {name: each.root_mean_square() - before[name] for name, each in stored.items()}
        largest = max(excess, key=lambda name: excess[name])
        answer = StreamedExpert(architecture, shape, stored, condition)
        measured = self.trial(silo_id).measure(answer, silo_id, digest, expert.expert_id)
        return ExpertFigures(
            expert_id=expert.expert_id,
            digest=expert.file.digest,
            losses=tuple(_rounded(loss_N.tolist(), _PLACES) for loss_N in measured.losses),
            excess_rms=excess[largest],
            excess_tensor=largest,
            answers=measured.answers,
            worst=measured.worst,
            drawn=measured.drawn,
        )


def refuse_outliers(federation: Federation, inventory: Inventory) -> None:
    """Compare all accepted experts with each other once more, before the router is trained.

    Raises:
        RefusedError: one stands apart from the others, and nobody has admitted it.
    """
    examiner = Examiner(federation, inventory.plan)
    silos = inventory.silos.items()
    found = examiner.outliers(
        {
            name: examiner.examine(name, silo.submission, silo.digest, silo.folder)
            for name, silo in silos
        }
    )
    if found:
        raise RefusedError(
            "accepted experts",
            expected="no expert that stands apart from the others, unless a person admitted it",
            got="; ".join(f"{silo_id}: {faults[0]}" for silo_id, faults in found.items())[:1000],
            remedy=f"See the figures: aggregator quarantine {federation.path}. Then for each silo: aggregator admit "
            f"{federation.path} SILO --reason TEXT, or aggregator withdraw.",
        )


def _rounded(values: Sequence[float], places: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.{places}g}") for value in values)
