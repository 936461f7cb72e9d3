"""Audits one expert: trains a reference and an overfitted copy, attacks all three, and looks for copies in samples.

Every part is on disk once it is done; what was killed goes on behind the last one, and a training at its last
checkpoint. Memory holds one block of images, the thumbnails of samples, and up to three experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ddm.audit.attacks import CALLS, Target
from ddm.audit.copies import NEIGHBOURS, Scale, duplicates, share_of_copies
from ddm.audit.effort import SAMPLE_STEPS
from ddm.audit.membership import Scored, membership, unseen
from ddm.audit.running import draw_samples, score_images
from ddm.audit.verdict import Findings
from ddm.diffusion.path import path_named
from ddm.evaluation.copies import pixel_rows
from ddm.evaluation.neighbours import nearest_in_blocks
from ddm.images.rows import Selected, blocks
from ddm.protocol.base import File
from ddm.training.job import discard_job
from ddm.training.jobs import train_job
from ddm.training.loop import Progress
from silo.audit.document import ExpertAudit
from silo.audit.parts import CHUNK, Parts
from silo.audit.report import cannot_judge, expert_audit
from silo.audit.subject import Side, Subject
from silo.audit.worst import keep_worst

# Shape legend: N images learned, H held out, S samples, B of a block, K neighbours.

BLURRED, _BLUR = 128, 0.01  # of the range
_SPACES = ("pixels", "features")


@dataclass
class _Meter:
    """Counts evaluations of the expert; stops the work where `tell` raises."""

    tell: Callable[[int, int], None]
    total: int
    done: int = field(default=0)

    def add(self, num: int) -> None:
        self.done = min(self.done + num, self.total)
        self.tell(self.done, self.total)


def audit_expert(
    subject: Subject, tell: Callable[[int, int], None], should_stop: Callable[[], bool]
) -> ExpertAudit:
    """Measure what an expert remembers, and judge it.

    Args:
        subject: the expert, and whom it is tested on.
        tell: called with evaluations done and in all; what it raises stops the work.
        should_stop: its yes stops a training after a checkpoint.

    Raises:
        KeyboardInterrupt: `should_stop` said yes, or `tell` raised it.
    """
    limits = subject.plan.audit
    if subject.num_held < max(limits.min_holdout_units, 2) or subject.members.num_units < 2:
        return cannot_judge(subject.expert_id, subject.num_held, limits)
    parts, effort = Parts.open(subject.folder / "parts", subject.digest), subject.effort
    num_images = len(subject.members.image_I) + len(subject.held.image_I)
    steps = (
        3
        * (effort.reference_steps + effort.control_steps)
        * subject.plan.expert.training.batch_size
    )
    meter = _Meter(
        tell,
        steps + 3 * CALLS * num_images + SAMPLE_STEPS * effort.num_samples + len(subject.learned_N),
    )
    trained = _Trained(subject, parts, meter, should_stop)
    of_expert = _scores(subject, parts, "expert", subject.base.file, meter)
    of_reference = _scores(subject, parts, "reference", trained.reference(), meter)
    overfitted = _control_units(subject.members, effort.control_units)
    of_control = _scores(subject, parts, "control", trained.control(overfitted), meter)
    near = _neighbours(subject, parts, meter)

    kept_H = ~duplicates(near["pixels of held"])
    kept_U = torch.ones(subject.held.num_units, dtype=torch.bool)
    kept_U[subject.held.unit_I[~kept_H]] = False
    num_kept = int(kept_U.sum())
    if num_kept < max(limits.min_holdout_units, 2):
        return cannot_judge(subject.expert_id, num_kept, limits)
    every_U = torch.ones(subject.members.num_units, dtype=torch.bool)
    only_U = torch.arange(subject.members.num_units) < effort.control_units
    expert, reference = (
        _scored(subject, each, every_U, kept_U) for each in (of_expert, of_reference)
    )
    control, beside = (
        _scored(subject, each, only_U, kept_U) for each in (of_control, of_reference)
    )
    held_H = kept_U[subject.held.unit_I]
    scales = {
        space: Scale.of(near[f"{space} of held"][held_H], floor=space == "pixels")
        for space in _SPACES
    }
    found = Findings(
        num_holdout=num_kept,
        membership=membership(expert, reference),
        control=membership(control, beside),
        unseen=subject.public is not None or unseen(reference),
        copies={
            space: share_of_copies(scales[space], near[f"{space} of samples"]) for space in _SPACES
        },
        control_copies={
            space: float(scales[space].near_copies(near[f"{space} of blurred"]).double().mean())
            for space in _SPACES
        },
    )
    keep_worst(subject, parts, found.membership, near, scales["pixels"])
    return expert_audit(subject.expert_id, found, limits, effort.num_samples)


@dataclass(frozen=True)
class _Trained:
    """The two experts that an audit trains itself."""

    subject: Subject
    parts: Parts
    meter: _Meter
    should_stop: Callable[[], bool]

    def reference(self) -> File:
        """Return the public expert, or one that is trained on what the expert learned without the members' units."""
        public = self.subject.public
        if public is not None:
            return public.file
        return self._train(
            "reference", self.subject.others_N, self.subject.effort.reference_steps, again=False
        )

    def control(self, overfitted: Side) -> File:
        """Return a copy of the expert that went on with a few members alone."""
        chosen = torch.sort(overfitted.image_I).values
        return self._train("control", chosen, self.subject.effort.control_steps, again=True)

    def _train(self, name: str, chosen: Tensor, num_steps: int, *, again: bool) -> File:
        subject, path = self.subject, self.parts.folder / f"{name}.safetensors"
        size, before = subject.plan.expert.training.batch_size, [0]

        def watch(progress: Progress) -> None:
            self.meter.add(3 * size * (progress.step - before[0]))
            before[0] = progress.step

        if not path.exists():
            folder = subject.job(name)
            expert = subject.planned(subject.base if again else None, num_steps, quick=again)
            wanted = subject.wanted(expert, chosen, folder)
            settings = subject.settings
            train_job(
                wanted, folder, settings, path, on_progress=watch, should_stop=self.should_stop
            )
            discard_job(folder)
        else:
            self.meter.add(3 * size * num_steps)
        return File.of(path.name, path)


def _control_units(members: Side, num: int) -> Side:
    return members.only(torch.arange(members.num_units) < num)


def _scores(
    subject: Subject, parts: Parts, name: str, file: File, meter: _Meter
) -> Mapping[str, Tensor]:
    """Attack one expert, members first; the same noise for each expert."""
    sides = {"members": subject.members, "held": subject.held}

    def make() -> Mapping[str, Tensor]:
        target = _target(subject, parts, name, file)
        return {
            side: score_images(
                target,
                subject.inputs.images,
                each.image_I,
                subject.condition_N,
                subject.seed + number,
                add,
            )
            for number, (side, each) in enumerate(sides.items())
        }

    counted = [0]

    def add(num: int) -> None:
        counted[0] += num
        meter.add(CALLS * num)

    found = parts.once(f"scores-{name}", make)
    meter.add(CALLS * (sum(len(each.image_I) for each in sides.values()) - counted[0]))
    return found


def _target(subject: Subject, parts: Parts, name: str, file: File) -> Target:
    if name == "expert":
        return subject.target(subject.base.folder, file)
    public = subject.public if name == "reference" else None
    return subject.target(public.folder if public else parts.folder, file)


def _scored(
    subject: Subject, found: Mapping[str, Tensor], member_U: Tensor, other_U: Tensor
) -> Scored:
    """Take the scores of some of the units of either side."""
    members, held = subject.members, subject.held
    return Scored(
        found["members"][member_U[members.unit_I]],
        found["held"][other_U[held.unit_I]],
        members.only(member_U).unit_I,
        held.only(other_U).unit_I,
    )


def _samples(subject: Subject, parts: Parts, meter: _Meter) -> Iterator[Mapping[str, Tensor]]:
    """Yield the thumbnails and features of samples, chunk by chunk, each drawn under an image's own condition."""
    plan, random = subject.plan, np.random.default_rng(subject.seed + 2)
    picked_S = torch.from_numpy(
        random.integers(len(subject.learned_N), size=subject.effort.num_samples)
    )
    low, high = plan.data.range
    for start in range(0, len(picked_S), CHUNK):
        chosen = subject.learned_N[picked_S[start : start + CHUNK]]

        def make(start: int = start, chosen: Tensor = chosen) -> Mapping[str, Tensor]:
            target = subject.target(subject.base.folder, subject.base.file)
            condition = None if subject.condition_N is None else subject.condition_N[chosen]
            path, shape, seed = (
                path_named(plan.objective.ensemble_path),
                plan.expert_shape,
                subject.seed + start,
            )
            thumbs, features = [], []
            for drawn in draw_samples(
                target, path, shape, condition, len(chosen), seed, lambda num: None
            ):
                meter.add(SAMPLE_STEPS * len(drawn))
                images = (
                    subject.files.latent.decode(drawn, lost=0.0).clamp(low, high).nan_to_num(0.0)
                )
                thumbs.append(pixel_rows(images))
                features.append(subject.files.encoder.encode(images, lost=0.0))
            return {"pixels": torch.cat(thumbs), "features": torch.cat(features)}

        yield parts.once(f"samples-{start}", make)


def _neighbours(subject: Subject, parts: Parts, meter: _Meter) -> Mapping[str, Tensor]:
    """Find the nearest learned images of those held out, of samples, and of learned images with a little noise."""

    def make() -> Mapping[str, Tensor]:
        images, encoder, plan = subject.pixels, subject.files.encoder, subject.plan
        random = torch.Generator().manual_seed(subject.seed + 3)
        picked = torch.randperm(len(subject.learned_N), generator=random)[:BLURRED]
        blurred = images[torch.sort(subject.learned_N[picked]).values]
        low, high = plan.data.range
        blurred = blurred + _BLUR * (high - low) * torch.randn(blurred.shape, generator=random)
        sampled = list(_samples(subject, parts, meter))
        held = [images[rows] for rows in torch.split(subject.held.image_I, CHUNK)]
        asked = {
            "pixels": [
                *map(pixel_rows, held),
                pixel_rows(blurred),
                *(each["pixels"] for each in sampled),
            ],
            "features": [
                *(encoder.encode(each, lost=0.0) for each in held),
                encoder.encode(blurred, lost=0.0),
                *(each["features"] for each in sampled),
            ],
        }
        found, learned = {}, Selected(images, subject.learned_N)
        sizes = [len(subject.held.image_I), len(blurred), subject.effort.num_samples]
        for space, rows in asked.items():

            def near(space: str = space) -> Iterator[tuple[int, Tensor]]:
                for start, block in blocks(learned):
                    meter.add(len(block) if space == "features" else 0)
                    yield (
                        start,
                        pixel_rows(block) if space == "pixels" else encoder.encode(block, lost=0.0),
                    )

            apart_QK, which_QK = nearest_in_blocks(torch.cat(rows), near(), NEIGHBOURS)
            for name, each, which in zip(
                ("held", "blurred", "samples"),
                torch.split(apart_QK, sizes),
                torch.split(which_QK[:, 0], sizes),
                strict=True,
            ):
                found[f"{space} of {name}"] = each.clone()
                found[f"{space} near {name}"] = which.clone()
        return found

    return parts.once("neighbours", make)
