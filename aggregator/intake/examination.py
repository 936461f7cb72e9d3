"""Measures submitted experts on the federation's public images, each once; `intake.screening` has the rules."""

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aggregator.config import PUBLIC_NAME, Federation
from aggregator.intake.drawn import Gallery, PublicSet, num_gallery_images
from aggregator.intake.flags import Fault, flags_of, remember_flags
from aggregator.intake.inventory import Inventory
from aggregator.intake.quarantine import decisions_on, is_admitted, refused_before
from aggregator.intake.screening import (
    BaseFigures,
    ExpertFigures,
    Probe,
    absolute_faults,
    copy_faults,
    fresh_rms,
    relative_faults,
)
from aggregator.intake.secret import load_screening_secret
from aggregator.intake.trial import Trial
from ddm.diffusion.path import path_named
from ddm.errors import DataError, RefusedError
from ddm.io.files import FileIdentity, file_identity, read_bounded, write_atomic
from ddm.io.tensors import check_file
from ddm.loading.plan import PlanFiles
from ddm.models import MAX_WEIGHT, expected_tensors, training_flops
from ddm.models.streamed import StoredTensor, StreamedExpert, stored_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, PlanId, SiloId, sha256_hex
from ddm.protocol.learning import ExpertObjective, OwnAdaptation
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, SubmittedExpert, expert_path, submission_path

PUBLIC_PARTS: tuple[Literal["holdout", "fitted"], ...] = ("holdout", "fitted")
# What numpy, zipfile and zlib raise for a damaged archive; RuntimeError where it seems to be encrypted.
_DAMAGED_ARCHIVE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
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

    Raises:
        DataError: the file is damaged.
    """
    path = federation.plan_folder(plan_id) / PUBLIC_NAME
    try:
        # Opened here, since numpy leaves a damaged file open.
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
            name: str = part
            if as_latents and f"{part}_latents" in archive.files:
                name = f"{part}_latents"
            return torch.from_numpy(archive[name])
    except _DAMAGED_ARCHIVE_ERRORS as error:
        raise DataError(
            f"plans/{plan_id}/{PUBLIC_NAME}",
            expected="the public images of the plan",
            got=f"a damaged file ({type(error).__name__})",
            remedy="Restore plans/ from backup, or sign a new plan.",
        ) from error


@dataclass(frozen=True)
class _StoredBase:
    """The expert from which the training of another starts, in a file of the federation.

    Attributes:
        path: the file.
        max_bytes: most bytes it may have.
        digest: what the plan lists for it; None where the plan does not.
    """

    path: Path
    max_bytes: int
    digest: Digest | None


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

    @cached_property
    def _document_paths(self) -> dict[str, Path]:
        """Where the document of each silo's accepted submission is, once there is one."""
        return {
            silo_id: self.federation.accepted_folder(self.plan, silo_id) / submission_path(silo_id)
            for silo_id in self.plan.members
        }

    @cached_property
    def _accepted(self) -> dict[str, tuple[FileIdentity, Examination]]:
        """The examination of each accepted submission that was read, and the document that it is of."""
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
        # Silos that train on the same objective share a trial, and are compared with each other.
        objective = self.plan.objective.of(silo_id)
        return ExpertObjective(path=objective.path, prediction=objective.prediction)

    def _trial(self, objective: ExpertObjective) -> Trial:
        plan = self.plan
        images = public_images(self.federation, plan.plan_id, "holdout")
        training_step_flops = training_flops(
            plan.expert.architecture, plan.expert_shape, 1, plan.condition
        )
        return Trial(
            secret=load_screening_secret(self.federation),
            plan_id=plan.plan_id,
            objective=objective,
            canonical=path_named(plan.objective.ensemble_path),
            condition=plan.condition,
            # A copy, or the view would keep all public images in memory.
            images=images[: num_gallery_images(images[0].numel())].clone(),
            mean=public_images(self.federation, plan.plan_id, "fitted").mean(0),
            gallery=self._gallery,
            # The backward pass of a training step costs twice as much as its forward pass.
            forward_flops=training_step_flops / 3,
        )

    @cached_property
    def _gallery(self) -> Gallery:
        """The public images with which drawn ones are compared, held-out ones first."""
        files = PlanFiles.load(self.plan, self.federation.plan_targets(self.plan.plan_id))

        def encode(samples: Tensor) -> Tensor:
            return files.encoder.encode(files.latent.decode(samples))

        points = self._gallery_images(as_latents=True).flatten(1)
        features = files.encoder.encode(self._gallery_images(as_latents=False))
        return Gallery(PublicSet(points), PublicSet(features), encode)

    def _gallery_images(self, *, as_latents: bool) -> Tensor:
        parts = [
            public_images(self.federation, self.plan.plan_id, part, as_latents=as_latents)
            for part in PUBLIC_PARTS
        ]
        num_images = num_gallery_images(parts[0][0].numel())
        return torch.cat([part[:num_images] for part in parts])[:num_images].clone()

    def check_own_files(self, silo_id: str, submission: Submission, digest: str) -> None:
        """Read the federation's files that `examine` and `faults` need: after that, a fault is the submission's.

        Args:
            silo_id: whose submission.
            submission: the document.
            digest: the digest of the document.

        Raises:
            ArchipelagoError: one of the files is damaged.
        """
        plan = self.plan
        self.trial(silo_id)
        flags_of(self.federation, plan.plan_id, digest)
        refused_before(self.federation, plan.plan_id, silo_id)
        specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
        for expert in submission.experts:
            self._known_figures(expert.expert_id, digest)
            base = self._base(silo_id, expert.expert_id)
            if base is not None:
                check_file(
                    base.path,
                    specs,
                    max_bytes=base.max_bytes,
                    max_abs=MAX_WEIGHT,
                    digest=base.digest,
                )

    def _base(self, silo_id: str, expert_id: str) -> _StoredBase | None:
        """Find the expert that training starts from; None where there is none, or it is gone."""
        plan = self.plan
        adaptation = plan.expert.adaptation
        if plan.expert.base is not None:
            path = self.federation.plan_targets(plan.plan_id) / plan.expert.base
            listed = plan.file(plan.expert.base)
            return _StoredBase(path, listed.bytes, listed.digest)
        if isinstance(adaptation, OwnAdaptation) and silo_id in adaptation.submissions:
            earlier = self.federation.accepted / adaptation.plan_id / silo_id
            path = earlier / expert_path(silo_id, expert_id)
            # Withdrawn since: without it, weights seem to have grown more, and a person looks at them.
            if path.is_file():
                return _StoredBase(path, path.stat().st_size, None)
        return None

    def _base_tensors(self, silo_id: str, expert_id: str) -> dict[str, StoredTensor]:
        """Find the tensors of the expert that training starts from; empty where there is none, or it is gone."""
        base = self._base(silo_id, expert_id)
        if base is None:
            return {}
        expert = self.plan.expert
        return stored_tensors(
            expert.architecture,
            self.plan.expert_shape,
            base.path,
            base.max_bytes,
            self.plan.condition,
        )

    def _base_figures(
        self,
        silo_id: str,
        tensors: Mapping[str, StoredTensor],
        base_tensors: Mapping[str, StoredTensor],
        answers: Sequence[float],
    ) -> BaseFigures | None:
        """Measure how far an expert is from the one that it started from."""
        if not base_tensors:
            return None
        plan = self.plan
        base = StreamedExpert(
            plan.expert.architecture, plan.expert_shape, base_tensors, plan.condition
        )
        base_answers = self.trial(silo_id).answers(base)
        differences = [
            (answer - base_answer) ** 2
            for answer, base_answer in zip(answers, base_answers, strict=True)
        ]
        move = max(tensor.distance(base_tensors[name]) for name, tensor in tensors.items())
        difference = sum(differences) / len(differences)
        return BaseFigures(move=move, difference=difference)

    def examine(
        self, silo_id: str, submission: Submission, digest: str, folder: Path
    ) -> Examination:
        """Measure the experts of a verified submission, except those that were measured before.

        Args:
            silo_id: whose.
            submission: the document.
            digest: the digest of the document.
            folder: holds the experts; no other process writes there.
        """
        figures = tuple(
            self._examine_expert(silo_id, expert, digest, folder) for expert in submission.experts
        )
        return Examination(silo_id, digest, figures)

    def accepted(self, remaining: Set[str]) -> dict[str, Examination]:
        """Measure the experts of every accepted submission, by silo; each document is read once.

        Args:
            remaining: the plan's silos that take part (`remaining_silos`).
        """
        examinations = {}
        for silo_id in sorted(remaining):
            document_path = self._document_paths[silo_id]
            identity = file_identity(document_path)
            # The folder of a silo appears by a rename once intake has accepted its submission.
            if identity is None:
                continue
            known_identity, examination = self._accepted.get(silo_id, (None, None))
            # With hundreds of silos, to read all of them again for each submission would take most of the time.
            if examination is None or known_identity != identity:
                examination = self._examine_accepted(silo_id, document_path)
                self._accepted[silo_id] = (identity, examination)
            examinations[silo_id] = examination
        return examinations

    def _examine_accepted(self, silo_id: str, document_path: Path) -> Examination:
        document = read_bounded(document_path, MAX_DOCUMENT_BYTES)
        submission = Submission.parse(document, subject=f"submission of {silo_id}")
        folder = self.federation.accepted_folder(self.plan, silo_id)
        return self.examine(silo_id, submission, sha256_hex(document), folder)

    def faults(self, new: Examination, accepted: Mapping[str, Examination]) -> list[str]:
        """Describe what is implausible about a submission, alone and beside other silos', and store its flags."""
        training = self.plan.expert.training
        probe = self.probe(new.silo_id)
        experts_of_others = {
            silo_id: examination.experts
            for silo_id, examination in accepted.items()
            if silo_id != new.silo_id
        }
        faults: list[Fault] = []
        for expert in new.experts:
            faults += absolute_faults(expert, probe, training, rehearsal=self.plan.rehearsal)
            faults += copy_faults(expert, experts_of_others, training)
        faults += self._relative_faults({**accepted, new.silo_id: new}).get(new.silo_id, [])
        if refused_before(self.federation, self.plan.plan_id, new.silo_id):
            # A silo that may try often enough passes once by chance, so from now on a person looks at all it sends.
            words = " comes after a submission of this silo that was flagged and refused: compare the two"
            for expert in new.experts:
                faults.append(Fault(expert_id=expert.expert_id, flag="refused_before", words=words))
        return self._store_flags(new, faults)

    def outliers(self, accepted: Mapping[str, Examination]) -> dict[str, list[str]]:
        """Describe which accepted silos stand apart now that later ones are there, except those admitted for it."""
        outliers = {}
        for silo_id, faults in self._relative_faults(accepted).items():
            examination = accepted[silo_id]
            descriptions = self._store_flags(examination, faults)
            decisions = decisions_on(self.federation, examination.submission_digest)
            if not is_admitted(decisions, "stands_apart"):
                outliers[silo_id] = descriptions
        return outliers

    def ratios(self, examination: Examination) -> dict[str, tuple[float, ...]]:
        """Return each expert's loss in each band as a multiple of that of answering 0."""
        silent_Z = self.probe(examination.silo_id).silent_Z
        return {
            expert.expert_id: _rounded((expert.loss_Z / silent_Z).tolist(), 3)
            for expert in examination.experts
        }

    def _relative_faults(self, examinations: Mapping[str, Examination]) -> dict[str, list[Fault]]:
        """Compare experts with the same objective; losses of different objectives are in different units."""
        by_objective: dict[ExpertObjective, dict[str, tuple[ExpertFigures, ...]]] = {}
        for silo_id, examination in examinations.items():
            experts_of_silos = by_objective.setdefault(self._objective(silo_id), {})
            experts_of_silos[silo_id] = examination.experts
        faults: dict[str, list[Fault]] = {}
        for experts_of_silos in by_objective.values():
            faults |= relative_faults(experts_of_silos)
        return faults

    def _store_flags(self, examination: Examination, faults: Sequence[Fault]) -> list[str]:
        """Store the flags and return the faults in words."""
        if faults:
            plan_id = self.plan.plan_id
            remember_flags(self.federation, plan_id, examination.submission_digest, faults)
        return [str(fault) for fault in faults]

    def _examine_expert(
        self, silo_id: str, expert: SubmittedExpert, digest: str, folder: Path
    ) -> ExpertFigures:
        known_figures = self._known_figures(expert.expert_id, digest)
        if known_figures is not None:
            return known_figures
        # Shows the supervisor that the work continues: one expert may take minutes.
        self.on_expert()
        figures = self.measure_expert(silo_id, folder, expert, digest)
        examination = ExpertExamination(
            plan_id=self.plan.plan_id, silo_id=silo_id, submission_digest=digest, expert=figures
        )
        write_atomic(self._figures_path(expert.expert_id, digest), examination.encode())
        return figures

    def _known_figures(self, expert_id: str, digest: str) -> ExpertFigures | None:
        """Read what was measured of an expert before; None where nothing was."""
        path = self._figures_path(expert_id, digest)
        if not path.is_file():
            return None
        data = read_bounded(path, MAX_DOCUMENT_BYTES)
        return ExpertExamination.parse(data, subject=path.name).expert

    def _figures_path(self, expert_id: str, digest: str) -> Path:
        # By the digest of the submission: what was measured of it holds for the plan's life, also after a restart.
        return self.federation.screening / self.plan.plan_id / digest / f"{expert_id}.json"

    def measure_expert(
        self, silo_id: str, folder: Path, expert: SubmittedExpert, digest: str
    ) -> ExpertFigures:
        """Measure one expert: how far its weights grew, and its answers in a trial."""
        plan = self.plan
        architecture = plan.expert.architecture
        # One layer at a time is in memory, however large an expert is (docs/explanation/transfer.md).
        tensors = stored_tensors(
            architecture,
            plan.expert_shape,
            folder / expert.file.path,
            expert.file.bytes,
            plan.condition,
        )
        base_tensors = self._base_tensors(silo_id, expert.expert_id)
        # A weight grows from where training starts: a random draw, or the expert that it continues from.
        excess = {}
        for name, tensor in tensors.items():
            fresh = fresh_rms(tensor.shape, has_unit_weights=architecture.has_unit_weights)
            start_rms = fresh
            if name in base_tensors:
                start_rms = max(fresh, base_tensors[name].root_mean_square())
            excess[name] = tensor.root_mean_square() - start_rms
        # One tensor is enough: weights that encode something else than training may be hidden in a single layer.
        largest = max(excess, key=lambda name: excess[name])
        answer = StreamedExpert(architecture, plan.expert_shape, tensors, plan.condition)
        results = self.trial(silo_id).measure(answer, silo_id, digest, expert.expert_id)
        return ExpertFigures(
            expert_id=expert.expert_id,
            digest=expert.file.digest,
            losses=tuple(_rounded(loss_N.tolist(), _PLACES) for loss_N in results.losses),
            excess_rms=excess[largest],
            excess_tensor=largest,
            answers=results.answers,
            worst=results.worst,
            drawn=results.drawn,
            base=self._base_figures(silo_id, tensors, base_tensors, results.answers),
        )


def refuse_outliers(federation: Federation, inventory: Inventory) -> None:
    """Compare all accepted experts with each other once more, before the router is trained.

    Raises:
        RefusedError: one stands apart from the others, and nobody has admitted it.
    """
    examiner = Examiner(federation, inventory.plan)
    examinations = {
        silo_id: examiner.examine(silo_id, silo.submission, silo.digest, silo.folder)
        for silo_id, silo in inventory.silos.items()
    }
    outliers = examiner.outliers(examinations)
    if outliers:
        first_faults = [f"{silo_id}: {faults[0]}" for silo_id, faults in outliers.items()]
        raise RefusedError(
            "accepted experts",
            expected="no expert that stands apart from the others, unless a person admitted it",
            got="; ".join(first_faults)[:1000],
            remedy=(
                f"See the figures: `aggregator quarantine {federation.path}`. Then for each silo: "
                f"`aggregator admit {federation.path} SILO --reason TEXT`, or `aggregator withdraw "
                f"{federation.path} SILO --reason TEXT`."
            ),
        )


def _rounded(values: Sequence[float], places: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.{places}g}") for value in values)
