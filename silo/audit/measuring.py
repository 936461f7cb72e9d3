"""Audits one expert: trains others to compare it with, attacks all of them, and looks for copies in samples.

The others are a reference, shadows and an overfitted copy. Every measurement is on disk once it is taken; a killed
audit continues behind the last one, and a training at its last checkpoint. Memory holds one block of images, the
thumbnails of samples, and up to two experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ddm.audit.attacks import CALLS
from ddm.audit.copies import NEIGHBOURS, CopyScale, duplicates, share_of_copies
from ddm.audit.crossfit import MIN_UNITS
from ddm.audit.effort import NUM_SHADOWS, SAMPLE_STEPS, TRAINING_CALLS
from ddm.audit.membership import Membership, UnitScores, measure_membership, sides_alike
from ddm.audit.running import draw_samples, score_images
from ddm.audit.verdict import MeasuredLeaks
from ddm.diffusion.path import path_named
from ddm.evaluation.copies import pixel_rows
from ddm.evaluation.neighbours import nearest_in_blocks
from ddm.images.rows import SelectedImages, blocks
from ddm.protocol.base import File
from ddm.system.progress import ProgressCallback
from ddm.training.job import discard_job
from ddm.training.jobs import train_job
from ddm.training.planned import BaseExpert
from ddm.training.progress import Progress
from silo.audit.document import ExpertAudit
from silo.audit.parts import CHUNK, MeasurementStore
from silo.audit.report import expert_audit, inconclusive_audit
from silo.audit.subject import AuditedExpert
from silo.audit.worst import write_worst

# Shape legend: I images of one side, H images held out, S samples, B of a block, Q queries, K neighbours, U units,
# A attacks.

MAX_BLURRED = 128
_BLUR = 0.01  # the standard deviation of the noise, as a share of the range
_SPACES = ("pixels", "features")
_QUERY_SETS = ("holdout", "blurred", "samples")
_Scores = Mapping[str, Tensor]
"""What all attacks on one expert give, (I, A), for the images of `members` and of `holdout`."""


@dataclass
class _EvaluationCounter:
    """Counts evaluations of the expert; stops the work where `on_progress` raises."""

    on_progress: ProgressCallback
    total: int
    num_evaluations: int = 0

    def add(self, num: int) -> None:
        self.num_evaluations = min(self.num_evaluations + num, self.total)
        self.on_progress(self.num_evaluations, self.total)


@dataclass(frozen=True)
class _Audit:
    """An audit at work.

    Attributes:
        expert: the audited expert.
        store: the store of its measurements.
        counter: of evaluations.
        should_stop: a True stops a training after a checkpoint.
    """

    expert: AuditedExpert
    store: MeasurementStore
    counter: _EvaluationCounter
    should_stop: Callable[[], bool]


def audit_expert(
    expert: AuditedExpert,
    on_progress: ProgressCallback,
    should_stop: Callable[[], bool],
) -> ExpertAudit:
    """Measure what an expert remembers, and judge it.

    Args:
        expert: the expert, and the units that it is tested on.
        on_progress: called with evaluations so far and in all; what it raises stops the work.
        should_stop: a True stops a training after a checkpoint.

    Raises:
        KeyboardInterrupt: `should_stop` returned True, or `on_progress` raised it.
    """
    limits = expert.plan.audit
    min_units = max(limits.min_holdout_units, MIN_UNITS)
    if expert.num_holdout < min_units or expert.members.num_units < MIN_UNITS:
        return inconclusive_audit(expert.expert_id, expert.num_holdout, limits)
    audit = _Audit(
        expert=expert,
        store=MeasurementStore.open(expert.folder / "parts", expert.digest),
        counter=_EvaluationCounter(on_progress, _num_evaluations(expert)),
        should_stop=should_stop,
    )
    # Shows how long it will take before the first training begins.
    audit.counter.add(0)

    attacked = _attack_all(audit)
    neighbours = _measure_neighbours(audit)

    # A unit held out whose image the expert learned from another unit is no test of anything.
    is_duplicate_H = duplicates(neighbours["pixels of holdout"])
    is_tested_U = torch.ones(expert.holdout.num_units, dtype=torch.bool)
    is_tested_U[expert.holdout.unit_I[is_duplicate_H]] = False
    num_tested = int(is_tested_U.sum())
    if num_tested < min_units:
        return inconclusive_audit(expert.expert_id, num_tested, limits)

    # The control knows a few members by heart, and is attacked on these alone.
    member_U = torch.arange(expert.members.num_units)
    every_member_U = torch.ones_like(member_U, dtype=torch.bool)
    overfitted_U = member_U < expert.effort.control_units
    membership = _membership(expert, attacked, "expert", every_member_U, is_tested_U)
    control = _membership(expert, attacked, "control", overfitted_U, is_tested_U)
    if expert.public is None:
        reference = _unit_scores(expert, attacked["reference"], every_member_U, is_tested_U)
        are_sides_alike = sides_alike(reference)
    else:
        # A public expert may have learned units of either side, so that nothing follows from what it knows.
        are_sides_alike = True

    # The scale of copies comes from the units that are left, for the same reason.
    is_tested_H = is_tested_U[expert.holdout.unit_I]
    scales = {}
    copies = {}
    control_copies = {}
    for space in _SPACES:
        holdout_HK = neighbours[f"{space} of holdout"][is_tested_H]
        scale = CopyScale.of(holdout_HK, has_floor=space == "pixels")
        is_copy_B = scale.near_copies(neighbours[f"{space} of blurred"])
        scales[space] = scale
        copies[space] = share_of_copies(scale, neighbours[f"{space} of samples"])
        control_copies[space] = float(is_copy_B.double().mean())
    findings = MeasuredLeaks(
        num_holdout=num_tested,
        membership=membership,
        control=control,
        sides_alike=are_sides_alike,
        copies=copies,
        control_copies=control_copies,
    )
    write_worst(expert, audit.store, membership, neighbours, scales["pixels"])
    return expert_audit(expert.expert_id, findings, limits, expert.effort.num_samples)


def _attack_all(audit: _Audit) -> dict[str, _Scores]:
    """Train the experts that the audit compares with, and attack each; return the scores by name.

    Most attacks compare the expert with one that knows less of the members: an image that is easy for both says nothing
    about membership. The control shows that the attacks find what was certainly learned.
    """
    scores = {}
    scores["expert"] = _attack(audit, "expert", audit.expert.base)
    scores["reference"] = _attack(audit, "reference", _reference(audit))
    for number in range(NUM_SHADOWS):
        name = _shadow_name(number)
        scores[name] = _attack(audit, name, _shadow(audit, number))
    scores["control"] = _attack(audit, "control", _overfitted_copy(audit))
    return scores


def _membership(
    expert: AuditedExpert,
    attacked: Mapping[str, _Scores],
    name: str,
    member_U: Tensor,
    holdout_U: Tensor,
) -> Membership:
    """Measure what attacks learn from the expert of this name, beside reference and shadows, on some of the units."""
    shadows = []
    for number in range(NUM_SHADOWS):
        shadow_scores = attacked[_shadow_name(number)]
        shadows.append(_unit_scores(expert, shadow_scores, member_U, holdout_U))
    return measure_membership(
        _unit_scores(expert, attacked[name], member_U, holdout_U),
        reference=_unit_scores(expert, attacked["reference"], member_U, holdout_U),
        shadows=shadows,
    )


def _shadow_name(number: int) -> str:
    return f"shadow-{number}"


def _num_evaluations(expert: AuditedExpert) -> int:
    num_attacked = len(expert.members.image_I) + len(expert.holdout.image_I)
    training = expert.plan.expert.training
    # The search for neighbours encodes each learned image once.
    return expert.effort.num_evaluations(training, num_attacked) + len(expert.learned_N)


def _reference(audit: _Audit) -> BaseExpert:
    """Return the public expert, or one that is trained on what the expert learned without the members' units."""
    expert = audit.expert
    if expert.public is not None:
        return expert.public
    num_steps = expert.effort.reference_steps
    return _train(audit, "reference", expert.others_N, num_steps, base=None)


def _shadow(audit: _Audit, number: int) -> BaseExpert:
    """Return the expert trained on with its own images except the members'.

    It forgets members, and keeps what it knows about all others. So its errors tell memory of an image from an image
    that is easy, which an expert trained from the start would only do after as many steps as the expert itself took.

    Source:
        After Chen et al. 2021, arXiv 2005.02205: a model before and after it unlearned a record gives the record away.
    """
    expert = audit.expert
    return _train(
        audit,
        _shadow_name(number),
        expert.others_N,
        expert.effort.shadow_steps,
        base=expert.base,
        draw=number,
    )


def _overfitted_copy(audit: _Audit) -> BaseExpert:
    """Return a copy of the expert that was trained further on a few members alone."""
    members = audit.expert.members
    effort = audit.expert.effort
    is_chosen_U = torch.arange(members.num_units) < effort.control_units
    chosen_units = members.select(is_chosen_U)
    # Sorted, since images are read from disk in the order of their numbers.
    image_I = torch.sort(chosen_units.image_I).values
    return _train(
        audit,
        "control",
        image_I,
        effort.control_steps,
        base=audit.expert.base,
        overfits=True,
    )


def _train(
    audit: _Audit,
    name: str,
    image_I: Tensor,
    num_steps: int,
    *,
    base: BaseExpert | None,
    overfits: bool = False,
    draw: int = 0,
) -> BaseExpert:
    """Train one of the experts that the audit compares with, or return the one that was trained before a restart.

    Args:
        audit: the audit.
        name: the name of the trained expert, and of its file.
        image_I: the numbers of the images that it learns.
        num_steps: the number of steps of the training.
        base: the expert that it starts from; None for random weights.
        overfits: see `AuditedExpert.planned`.
        draw: see `AuditedExpert.planned`.
    """
    expert = audit.expert
    step_evaluations = TRAINING_CALLS * expert.plan.expert.training.batch_size
    path = audit.store.folder / f"{name}.safetensors"
    if path.exists():
        # Trained before a restart: the progress counts it all the same.
        audit.counter.add(step_evaluations * num_steps)
        return BaseExpert(path.parent, File.of(path.name, path))
    last_step = 0

    def count(progress: Progress) -> None:
        nonlocal last_step
        num_new_steps = progress.step - last_step
        audit.counter.add(step_evaluations * num_new_steps)
        last_step = progress.step

    # Killed before the file is written, the training continues from the checkpoint in its job's folder.
    folder = expert.job_folder(name)
    planned = expert.planned(base, num_steps, overfits=overfits, draw=draw)
    train_job(
        expert.make_task(planned, image_I, folder),
        folder,
        expert.settings,
        path,
        on_progress=count,
        should_stop=audit.should_stop,
    )
    discard_job(folder)
    return BaseExpert(path.parent, File.of(path.name, path))


def _attack(
    audit: _Audit,
    name: str,
    weights: BaseExpert,
) -> _Scores:
    """Attack one expert, members first; the same noise for each expert."""
    expert = audit.expert
    num_attacked = 0

    def count(num: int) -> None:
        nonlocal num_attacked
        num_attacked += num
        audit.counter.add(CALLS * num)

    def measure() -> _Scores:
        attacked = expert.open_for_attack(weights)

        def score(image_I: Tensor, seed: int) -> Tensor:
            images = expert.inputs.images
            return score_images(attacked, images, image_I, expert.condition_N, seed, count)

        # The same seeds for all experts: their scores are compared image by image.
        return {
            "members": score(expert.members.image_I, expert.seed),
            "holdout": score(expert.holdout.image_I, expert.seed + 1),
        }

    scores = audit.store.load_or_measure(f"scores-{name}", measure)
    # Scores that were read from a file count too.
    num_images = len(expert.members.image_I) + len(expert.holdout.image_I)
    audit.counter.add(CALLS * (num_images - num_attacked))
    return scores


def _unit_scores(
    expert: AuditedExpert,
    scores: _Scores,
    member_U: Tensor,
    holdout_U: Tensor,
) -> UnitScores:
    """Select the scores of some of the units of either side."""
    members = expert.members
    holdout = expert.holdout
    is_selected_member_I = member_U[members.unit_I]
    is_selected_other_I = holdout_U[holdout.unit_I]
    return UnitScores(
        member_IA=scores["members"][is_selected_member_I],
        other_IA=scores["holdout"][is_selected_other_I],
        member_I=members.select(member_U).unit_I,
        other_I=holdout.select(holdout_U).unit_I,
    )


def _samples(audit: _Audit) -> Iterator[Mapping[str, Tensor]]:
    """Yield the thumbnails and features of samples, chunk by chunk, each drawn under an image's own condition."""
    expert = audit.expert
    random = np.random.default_rng(expert.seed + 2)
    # With the conditions of learned images: a memorised image shows most likely under its own caption or class.
    choice_S = random.integers(len(expert.learned_N), size=expert.effort.num_samples)
    image_S = expert.learned_N[torch.from_numpy(choice_S)]
    for start in range(0, len(image_S), CHUNK):
        chunk_S = image_S[start : start + CHUNK]
        draw = partial(_draw_chunk, audit, start, chunk_S)
        yield audit.store.load_or_measure(f"samples-{start}", draw)


def _draw_chunk(
    audit: _Audit,
    start: int,
    image_S: Tensor,
) -> Mapping[str, Tensor]:
    expert = audit.expert
    plan = expert.plan
    condition_S = None
    if expert.condition_N is not None:
        condition_S = expert.condition_N[image_S]
    latent_blocks = draw_samples(
        expert.open_for_attack(expert.base),
        path_named(plan.objective.ensemble_path),
        plan.expert_shape,
        condition_S,
        len(image_S),
        # Another seed for each chunk: a chunk that is drawn after a restart is the same as it would have been.
        expert.seed + start,
        lambda num: audit.counter.add(SAMPLE_STEPS * num),
    )
    low, high = plan.data.range
    rows = []
    for latents in latent_blocks:
        images = expert.files.latent.decode(latents, replacement=0.0)
        # An expert may give anything; a sample that is not a number is not a copy, and must not stop the audit.
        images = images.clamp(low, high).nan_to_num(0.0)
        rows.append(_rows_in_spaces(expert, images))
    chunk = {}
    for space in _SPACES:
        chunk[space] = torch.cat([block[space] for block in rows])
    return chunk


def _rows_in_spaces(expert: AuditedExpert, images: Tensor) -> dict[str, Tensor]:
    """Return images as rows of values, by space."""
    return {
        "pixels": pixel_rows(images),
        "features": expert.files.encoder.encode(images, replacement=0.0),
    }


def _measure_neighbours(audit: _Audit) -> Mapping[str, Tensor]:
    """Find the nearest learned images of those held out, of samples, and of learned images with a little noise.

    Returns:
        For each space and set of queries, squared distances (Q, K), as `pixels of samples`, and the place of the
        nearest image among those learned (Q,), as `pixels near samples`.
    """
    return audit.store.load_or_measure("neighbours", partial(_search_neighbours, audit))


def _search_neighbours(audit: _Audit) -> Mapping[str, Tensor]:
    expert = audit.expert
    blurred = _blurred_images(expert)
    queries: list[Mapping[str, Tensor]] = []
    for image_B in torch.split(expert.holdout.image_I, CHUNK):
        images = expert.pixels[image_B]
        queries.append(_rows_in_spaces(expert, images))
    # All queries in one search, since each pass reads and encodes every learned image.
    queries.append(_rows_in_spaces(expert, blurred))
    queries.extend(_samples(audit))
    sizes = [len(expert.holdout.image_I), len(blurred), expert.effort.num_samples]

    neighbours = {}
    for space in _SPACES:
        row_Q = torch.cat([rows[space] for rows in queries])
        learned_rows = _learned_rows(audit, space)
        distance_QK, image_QK = nearest_in_blocks(row_Q, learned_rows, NEIGHBOURS)
        distances = torch.split(distance_QK, sizes)
        nearest_images = torch.split(image_QK[:, 0], sizes)
        for index, name in enumerate(_QUERY_SETS):
            neighbours[f"{space} of {name}"] = distances[index].clone()
            neighbours[f"{space} near {name}"] = nearest_images[index].clone()
    return neighbours


def _blurred_images(expert: AuditedExpert) -> Tensor:
    """Return some learned images with a little noise: the control, which a search for copies must recognise."""
    random = torch.Generator().manual_seed(expert.seed + 3)
    order = torch.randperm(len(expert.learned_N), generator=random)
    chosen_B = expert.learned_N[order[:MAX_BLURRED]]
    # Sorted, since images are read from disk in the order of their numbers.
    image_B = torch.sort(chosen_B).values
    images = expert.pixels[image_B]
    low, high = expert.plan.data.range
    noise = torch.randn(images.shape, generator=random)
    return images + _BLUR * (high - low) * noise


def _learned_rows(audit: _Audit, space: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the learned images as rows, block by block, each with the place of its first."""
    expert = audit.expert
    for start, images in blocks(SelectedImages(expert.pixels, expert.learned_N)):
        if space == "features":
            audit.counter.add(len(images))
            yield start, expert.files.encoder.encode(images, replacement=0.0)
        else:
            # Every pass reports, so that it can be stopped.
            audit.counter.add(0)
            yield start, pixel_rows(images)
