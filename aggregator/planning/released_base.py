"""Makes an expert of an earlier release, or a student of it, the base of the next plan; verified, with its consent."""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.membership.withdrawal import has_left
from aggregator.planning.continuing import read_signed_plan
from ddm.diffusion.path import Expert, path_named, target_of, x_t
from ddm.diffusion.path import Path as DiffusionPath
from ddm.distillation.student import OwnSamples, read_record
from ddm.errors import DigestError, PolicyError, SetupError
from ddm.io.files import read_bounded
from ddm.loading.ensemble import load_ensemble
from ddm.loading.plan import PlanFiles
from ddm.loading.release import Release, open_release
from ddm.models.base_weights import BaseWeights
from ddm.planning.bases import BaseSource, BaseSpace, OpenedBase, read_weights
from ddm.planning.recipe import ReleaseBaseRecipe
from ddm.planning.released_base import (
    is_of_islands,
    no_consent_error,
    silos_without_consent,
    teachers_of,
    trained_plan,
)
from ddm.protocol.base import MAX_DOCUMENT_BYTES
from ddm.protocol.bases import ExpertBase, FileBase, StudentBase, TrainedBase
from ddm.protocol.data import DataSpec
from ddm.protocol.learning import ExpertObjective
from ddm.protocol.manifest import PublishedExpert
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, submission_path

# Shape legend: B images.

# Public images and times on which experts are compared.
MAX_COMPARED_IMAGES = 256
COMPARED_TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
_BATCH = 64


@dataclass(frozen=True)
class ComparedExpert:
    """How well an expert of a release predicts public images.

    Attributes:
        expert_id: its name.
        silo_id: whose it is.
        loss: mean square error of its velocity, on the ensemble's path.
    """

    expert_id: str
    silo_id: str
    loss: float


def verify_base_release(federation: Federation, chosen: ReleaseBaseRecipe) -> Release:
    """Verify the release that a base is taken from.

    Args:
        federation: the operator's folder, whose root counts where the recipe names none.
        chosen: the recipe's base.

    Raises:
        PolicyError: it is another federation's.
        TrustError, FormatError: see `ddm.loading.release.open_release`.
    """
    root = federation.tuf / "1.root.json"
    if chosen.root is not None:
        root = Path(chosen.root)
    # It may have been replaced by later versions since, and its timestamp may be over.
    release = open_release(Path(chosen.release), root=root, state=None, archived=True)
    # Silos of another federation agreed to its plans alone, and whether one has left since is known there only.
    if release.plan.root_digest != federation.root_digest and not is_of_islands(release):
        raise PolicyError(
            f"recipe, base.release {chosen.release}",
            expected="a release of this federation, or of islands",
            got="one of another federation, whose silos agree to a base for their federation's plans alone",
            remedy="Name a release of this federation. Or train a base: `aggregator base FED --recipe RECIPE --public "
            "PICTURES`.",
        )
    return release


def silos_that_left(federation: Federation, release: Release) -> frozenset[str]:
    """Return the silos whose consent is over: they withdrew their experts since, or were removed.

    These are silos of the release, and of the earlier rounds from which its experts began. Islands do not leave.

    Raises:
        MissingFileError: the plan of an earlier round is not in the federation's folder.
    """
    left = set()
    if release.plan.root_digest == federation.root_digest:
        for silo_id in release.submissions:
            if has_left(federation, trained_plan(release, silo_id), silo_id):
                left.add(silo_id)
    for plan in (release.plan, *release.earlier_plans.values()):
        left |= _earlier_silos_that_left(federation, plan)
    return frozenset(left)


def _earlier_silos_that_left(federation: Federation, plan: Plan) -> set[str]:
    """Return the silos whose consent is over, of all rounds that a plan's base goes back to."""
    left = set()
    waiting_plans = {plan.plan_id: plan}
    visited_plans = set()
    while waiting_plans:
        plan_id, plan = waiting_plans.popitem()
        visited_plans.add(plan_id)
        if plan.base is None or not isinstance(plan.base.origin, ExpertBase | StudentBase):
            continue
        origin = plan.base.origin
        if origin.root != federation.root_digest:
            continue
        round_before = read_signed_plan(federation, origin.plan_id)
        # A student may have started from this plan's base, even where no teacher of it trained for this plan.
        if isinstance(origin, StudentBase) and origin.plan_id not in visited_plans:
            waiting_plans[origin.plan_id] = round_before
        # The origin's other silos taught in rounds before that one.
        for silo_id in set(origin.silos) & set(round_before.members):
            # An expert that was carried over was trained for an earlier plan.
            trained_id = round_before.origin(silo_id)
            teacher_plan = round_before
            if trained_id != round_before.plan_id:
                teacher_plan = read_signed_plan(federation, trained_id)
            if has_left(federation, teacher_plan, silo_id):
                left.add(silo_id)
            if trained_id not in visited_plans:
                waiting_plans[trained_id] = teacher_plan
    return left


def check_not_submitted(federation: Federation, base: OpenedBase | None) -> None:
    """Refuse as a file, or as a base trained on public images, what learned the images of this federation's silos.

    These are the experts that silos sent, and the bases of earlier plans that came from a release. As a file they would
    need no consent, return after a withdrawal, and count as trained on no silo's images. Files are compared by digest,
    which signed documents state: this stops an error, and no aggregator that changes a byte.

    Raises:
        PolicyError: it is such an expert or base.
    """
    if base is None or not isinstance(base.source.origin, FileBase | TrainedBase):
        return
    digest = base.source.origin.digest
    for document in _submissions(federation):
        data = read_bounded(document, MAX_DOCUMENT_BYTES)
        submission = Submission.parse(data, subject=document.name)
        for expert in submission.experts:
            if expert.file.digest == digest:
                raise _not_a_file_error(
                    f"expert {expert.expert_id} of {submission.silo_id}, for plan {submission.plan_id}"
                )
    for plan in _signed_plans(federation):
        if plan.base is None or not isinstance(plan.base.origin, ExpertBase | StudentBase):
            continue
        # Its file in the plan differs from the original where classes, channels or texts were adjusted.
        if digest in (plan.base.digest, plan.base.origin.digest):
            raise _not_a_file_error(f"the base of plan {plan.plan_id}: {plan.base.words}")


def _not_a_file_error(got: str) -> PolicyError:
    """Return the error of a file that only a release may provide as a base; `got` says what it is."""
    return PolicyError(
        "recipe, base",
        expected="a file that learned no silo's images",
        got=got[:400],
        remedy="Leave the table [base] out, and name the release that it is from: `aggregator plan FED "
        "--recipe RECIPE --public PICTURES --from-release RELEASE --expert EXPERT`, or with --student FILE in place of "
        "--expert. Its silos must agree (serve_as_base), and must not have withdrawn it.",
    )


def _submissions(federation: Federation) -> Iterator[Path]:
    """Yield the documents of all submissions that passed verification: accepted, withdrawn, or in quarantine."""
    document = submission_path("*")
    yield from federation.accepted.glob(f"*/*/{document}")
    yield from federation.withdrawn.glob(f"*/*/submission/{document}")
    yield from federation.quarantine.glob(f"*/*/*/submission/{document}")


def _signed_plans(federation: Federation) -> Iterator[Plan]:
    """Yield every plan that this federation signed."""
    for folder in sorted((federation.path / "plans").glob("*")):
        if (federation.plan_targets(folder.name) / "plan.json").is_file():
            yield read_signed_plan(federation, folder.name)


def consenting_experts(release: Release, left: Set[str]) -> tuple[PublishedExpert, ...]:
    """Return the experts that may serve as a base: every silo whose images they learned agrees.

    Args:
        release: the release.
        left: the silos whose consent is over (`silos_that_left`).

    Raises:
        PolicyError: there is none.
    """
    experts = tuple(
        expert
        for expert in release.manifest.experts
        if not silos_without_consent(release, [expert], left)
    )
    if not experts:
        raise no_consent_error(release, ", ".join(silo.silo_id for silo in release.manifest.silos))
    return experts


def velocity_loss(expert: Expert, path: DiffusionPath, x_0: Tensor, eps: Tensor) -> float:
    """Return the mean square error of an expert's velocity over images and `COMPARED_TIMES`.

    Args:
        expert: called as ``expert(x_B, t_B)``.
        path: the path of the noising.
        x_0: images or latents, shape (N, ...).
        eps: their noise, of the same shape.
    """
    total = 0.0
    for x_0_B, eps_B in zip(torch.split(x_0, _BATCH), torch.split(eps, _BATCH), strict=True):
        for t in COMPARED_TIMES:
            t_B = x_0_B.new_full((len(x_0_B),), t)
            target = target_of(path, "velocity", x_0_B, eps_B, t_B)
            with torch.inference_mode():
                answer = expert(x_t(path, x_0_B, eps_B, t_B), t_B)
            total += float((answer - target).square().sum(dtype=torch.float64))
    return total / (x_0.numel() * len(COMPARED_TIMES))


def draw_compared_images(blocks: Iterable[Tensor], num_images: int) -> Tensor:
    """Draw `MAX_COMPARED_IMAGES` of the public images by a fixed seed, or all where there are fewer, in their order.

    The first ones would do no justice to images that are sorted, by their class or their origin.

    Args:
        blocks: all images in their order, of which only one block must be in memory, shape (B, C, H, W) each.
        num_images: how many they are.
    """
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0))
    rows = order[:MAX_COMPARED_IMAGES].sort().values
    drawn = []
    start = 0
    for block in blocks:
        end = start + len(block)
        rows_of_block = rows[(rows >= start) & (rows < end)]
        drawn.append(block[rows_of_block - start])
        start = end
    return torch.cat(drawn)


def compare_experts(
    release: Release, images: Tensor, data: DataSpec, left: Set[str]
) -> list[ComparedExpert]:
    """Measure the experts that may serve as a base on public images, the best one first.

    Args:
        release: the release.
        images: public images, shape (B, C, H, W); see `draw_compared_images`.
        data: their shape and range.
        left: the silos whose consent is over (`silos_that_left`).

    Raises:
        SetupError: images of another shape or range than the release's.
        PolicyError: no silo agrees that its experts serve as a base.
    """
    plan = release.plan
    if data != plan.data:
        raise SetupError(
            "recipe, data, to compare the experts of the release on public images",
            expected=f"shape {plan.data.shape} and range {plan.data.range}, as in the release",
            got=f"shape {data.shape} and range {data.range}",
            remedy="Name the expert: --expert.",
        )
    candidates = {expert.expert_id: expert for expert in consenting_experts(release, left)}
    x_0 = PlanFiles.load_latent(plan, release.folder).encode(images)
    ensemble = load_ensemble(release)
    path = path_named(plan.objective.ensemble_path)
    # Every expert meets the same noise.
    eps = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(0))
    compared = []
    for index, expert_id in enumerate(ensemble.expert_ids):
        if expert_id not in candidates:
            continue
        loss = velocity_loss(ensemble.experts[index], path, x_0, eps)
        compared.append(ComparedExpert(expert_id, candidates[expert_id].silo_id, loss))
    # NaN, of an expert whose answers overflow, is neither above nor below any loss, and could be sorted to the front.
    return sorted(compared, key=lambda expert: (isnan(expert.loss), expert.loss))


def student_source(release: Release, weights: Path, left: Set[str]) -> BaseSource:
    """Return a student that was distilled from a verified release as a base.

    Args:
        release: the release.
        weights: the student's file.
        left: the silos whose consent is over (`silos_that_left`).

    Raises:
        DigestError: it was distilled from another release, or its file is not the one of its record.
        PolicyError: a silo of the release, or of an earlier round, does not agree that its experts serve as a base.
        MissingFileError, DocumentError, TensorFileError: see `ddm.distillation.student.read_record`.
    """
    record = read_record(weights)
    if record.source.manifest != release.manifest_digest:
        raise DigestError(
            "student",
            expected=f"one of this release, manifest {release.manifest_digest[:16]}...",
            got=f"one of a release with the manifest {record.source.manifest[:16]}...",
            remedy="Name the release that the student was distilled from: --from-release.",
        )
    # It knows what all of its teachers know.
    teachers = release.manifest.experts
    dissenting_silos = silos_without_consent(release, teachers, left, by_student=True)
    if dissenting_silos:
        raise no_consent_error(release, ", ".join(dissenting_silos))
    silos, is_private = teachers_of(release, teachers, by_student=True)
    # Given images may be those of the silos themselves, from which nothing hides them.
    is_private = is_private and isinstance(record.images, OwnSamples)
    shape = record.latent.shape(record.data.shape)
    autoencoder = None
    if record.autoencoder is not None:
        autoencoder = record.autoencoder.digest
    return BaseSource(
        BaseWeights(read_weights(weights, record.file.digest), shape),
        record.architecture.position_span(shape),
        StudentBase(
            root=release.verified.root_fingerprint,
            plan_id=release.plan.plan_id,
            version=release.manifest.version,
            manifest=release.manifest_digest,
            silos=silos,
            digest=record.file.digest,
            trained_privately=is_private,
            images=record.images.kind,
        ),
        release.manifest.licence,
        record.images.num,
        ExpertObjective(path=record.path),
        BaseSpace(record.latent, autoencoder, record.condition, record.data.range),
        architecture=record.architecture,
    )
