"""The command `ddm distill`: train one dense student on a verified release, resumably, and record its origin."""

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import (
    DeviceOption,
    MemoryOption,
    ReleaseArgument,
    Verification,
    check_null,
    grouped,
    read_memory,
    warn_if_expired,
)
from ddm.distillation.start import initial_weights
from ddm.errors import DataError, SetupError
from ddm.io.locks import locked
from ddm.io.settings import Settings, load_settings
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    NoCondition,
    TextCondition,
)
from ddm.protocol.latent import Autoencoder
from ddm.system.console import human_seconds, progress, say
from ddm.system.devices import DeviceName
from ddm.system.signals import stop_on_first_signal
from ddm.training.config import Engine

if TYPE_CHECKING:
    from ddm.distillation.dataset import DistillationData
    from ddm.distillation.student import GivenImages, OwnSamples, StudentSource
    from ddm.ensemble import Ensemble
    from ddm.loading.release import Release
    from ddm.protocol.base import File
    from ddm.protocol.learning import Training
    from ddm.protocol.plan import Plan
    from ddm.training.loop import FinishedTraining

_DEFAULT_NUM = 4096
_SOLVER_STEPS = 50  # of own samples
_MOST = 2**53 - 1  # the record cannot hold a larger number
# the panels of the help
_STUDENT, _IMAGES, _TRAINING = (
    "The student",
    "Training images",
    "Training",
)
_WORK_SUFFIX, _SAMPLES, _CHECKPOINTS = ".work", "samples", "checkpoints"


class TeacherName(StrEnum):
    """What the student learns from at x_t."""

    LABEL = "label"
    DRAWN = "drawn"
    MIXTURE = "mixture"


class StartName(StrEnum):
    """Which weights training starts from."""

    EXPERT = "expert"
    RANDOM = "random"


class StudentSettings(Settings):
    """The file of `--architecture`."""

    architecture: Architecture


Out = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="FILE.safetensors; run again to continue where it stopped.",
        rich_help_panel=_STUDENT,
    ),
]
ArchitectureFile = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        metavar="FILE",
        help="TOML; default: the experts' architecture.",
        rich_help_panel=_STUDENT,
    ),
]
Unconditional = Annotated[
    bool,
    typer.Option(
        "--unconditional",
        help="No condition, although the experts have one.",
        rich_help_panel=_STUDENT,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="npz of public images and their labels, or pictures; default: own samples.",
        rich_help_panel=_IMAGES,
    ),
]
Texts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="npz of texts to draw own samples for; for experts with texts.",
        rich_help_panel=_IMAGES,
    ),
]
Num = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MOST,
        help=f"How many own samples; default {_DEFAULT_NUM}.",
        rich_help_panel=_IMAGES,
    ),
]
Teacher = Annotated[
    TeacherName | None,
    typer.Option(help="Default: label without --data, drawn with it.", rich_help_panel=_TRAINING),
]
Start = Annotated[
    StartName | None,
    typer.Option(
        help="Weights to start from; default: an expert's, where the student has its form.",
        rich_help_panel=_TRAINING,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, max=_MOST, help="Training steps; default: as an expert.", rich_help_panel=_TRAINING
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=_MOST, help="Of weights, samples and steps.", rich_help_panel=_TRAINING
    ),
]


@dataclass(frozen=True)
class _Wanted:
    """What to train, on which release, and from which weights: a file and the folder that it is in, or random ones."""

    opened: "Release"
    start: "tuple[Path, File] | None"
    ensemble: "Ensemble"
    source: "StudentSource"
    teacher: TeacherName
    condition: Condition
    network: Architecture
    training: "Training"
    out: Path
    device: DeviceName

    @property
    def work(self) -> Path:
        """Where samples and checkpoints are kept."""
        return self.out.with_suffix(_WORK_SUFFIX)


@grouped
def distill(
    release: ReleaseArgument,
    *,
    out: Out,
    architecture: ArchitectureFile = None,
    unconditional: Unconditional = False,
    data: Data = None,
    texts: Texts = None,
    num: Num = None,
    teacher: Teacher = None,
    start: Start = None,
    steps: Steps = None,
    seed: Seed = 0,
    verification: Verification,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
) -> None:
    """Train one dense student on an ensemble's answers; verifies first."""
    if out.suffix != ".safetensors" or out.is_dir():
        got = f"the folder {out.name}" if out.is_dir() else out.name
        raise SetupError("--out", expected="a file name that ends in .safetensors", got=got)
    if data and (num or texts):
        flag, value = ("--num", num) if num else ("--texts", texts)
        expected = f"either {flag}, for samples of the ensemble, or --data, for public images"
        raise SetupError(str(flag), expected=expected, got=f"both, with --data {data}")
    chosen = teacher or (TeacherName.DRAWN if data else TeacherName.LABEL)
    memory_bytes = read_memory(memory)
    own_network = (
        load_settings(StudentSettings, architecture).architecture if architecture else None
    )
    opened = verification.open(release, experts_later=True)
    plan = opened.plan
    network, condition = (
        own_network or plan.expert.architecture,
        NoCondition() if unconditional else plan.condition,
    )
    if unconditional:
        check_null(plan.condition, "--unconditional", "Leave --unconditional out.")
    if misfit := network.misfit(plan.expert_shape, condition):
        raise SetupError(
            "--architecture", expected=misfit, got=f"shape {plan.expert_shape}, {condition.kind}"
        )
    found = None if start is StartName.RANDOM else initial_weights(opened, network, condition)
    if start is StartName.EXPERT and found is None:
        expected = (
            "a student of an expert's architecture and condition, "
            "and an expert of velocities on the ensemble's path"
        )
        remedy = "Leave the flag out, to start from random weights."
        raise SetupError("--start expert", expected=expected, got="none of them", remedy=remedy)
    if texts and not isinstance(condition, TextCondition):
        raise SetupError(
            "--texts",
            expected="a student with texts as its condition",
            got=f"condition {condition.kind}",
        )
    # No tokens are masked: the teacher answers about whole images.
    changes = {
        "num_steps": steps or plan.expert.training.num_steps,
        "seed": seed,
        "mask_ratio": 0.0,
    }
    training = plan.expert.training.model_copy(update=changes)

    from ddm.loading.ensemble import build_ensemble
    from ddm.loading.memory import expert_memory_bytes
    from ddm.system.devices import device_named
    from ddm.system.memory import memory_limit

    where = device_named(device, setting="--device")
    beside = _needed(
        plan, network, condition, len(opened.manifest.experts), 0 if data else num or _DEFAULT_NUM
    )
    remedy = "Ask for fewer own samples (--num) or a smaller student (--architecture), or raise --memory."
    limit = memory_limit(memory_bytes)
    room = expert_memory_bytes(plan, opened.manifest, limit, beside=beside, remedy=remedy)
    ensemble = build_ensemble(plan, opened.manifest, opened.folder, memory_bytes=room, device=where)
    wanted = _Wanted(
        opened, found, ensemble, _source(opened), chosen, condition, network, training, out, device
    )
    wanted.work.mkdir(parents=True, exist_ok=True)
    with locked(wanted.work, "distillation"):
        dataset, images = (
            _public_images(wanted, data)
            if data
            else _own_samples(wanted, num or _DEFAULT_NUM, texts)
        )
        trained = _trained(wanted, dataset)
        _keep(wanted, trained, images)
    say(
        f"Student in {out}: {len(dataset.images)} images, teacher {chosen.value}, {training.num_steps} steps in "
        f"{human_seconds(trained.seconds)}, loss {trained.loss:.4f}. From {wanted.source.plan_id}, version "
        f"{wanted.source.version}, manifest {wanted.source.manifest}."
    )
    say(f"Sample from it: ddm sample-student {quote(str(out))} --num 16 --out student.png")
    warn_if_expired(opened)


def _needed(
    plan: "Plan", network: Architecture, condition: Condition, num_experts: int, num: int
) -> int:
    """Return the bytes of training a student on so many own samples, beside its teachers."""
    from ddm.footprint import labels_bytes, sampling_bytes
    from ddm.models import network_size

    batch = plan.expert.training.batch_size
    student = network_size(network, plan.expert_shape, condition).training_bytes(batch)
    # Samples are drawn in parts, and a step asks the teachers about one batch; the data stay in memory.
    teachers = sampling_bytes(plan, num_experts, num=batch, batch=batch, steps=_SOLVER_STEPS)
    kept = 3 * (4 * num * prod(plan.expert_shape) + labels_bytes(condition, num))
    return student + teachers + kept


def _source(opened: "Release") -> "StudentSource":
    from ddm.distillation.student import StudentSource

    verified, manifest = opened.verified, opened.manifest
    digest = verified.files["manifest.json"].digest
    return StudentSource(
        plan_id=manifest.plan_id,
        version=manifest.version,
        manifest=digest,
        root=verified.root_fingerprint,
    )


def _own_samples(
    wanted: _Wanted, num: int, texts: Path | None
) -> "tuple[DistillationData, OwnSamples]":
    """Draw the training images from the ensemble itself."""
    from ddm.distillation.dataset import own_samples, read_labels
    from ddm.distillation.student import OwnSamples
    from ddm.protocol.base import sha256_file

    seed = wanted.training.seed
    with progress(f"drawing {num} samples") as tell:
        drawn = own_samples(
            wanted.ensemble,
            num,
            wanted.work / _SAMPLES,
            source=wanted.source.manifest,
            condition=wanted.condition,
            texts=read_labels(texts, wanted.condition) if texts else None,
            seed=seed,
            on_progress=tell,
        )
    return drawn, OwnSamples(num=num, seed=seed, texts=sha256_file(texts) if texts else None)


def _public_images(wanted: _Wanted, data: Path) -> "tuple[DistillationData, GivenImages]":
    """Read public images, and their conditions, as training images."""
    import torch

    from ddm.distillation.dataset import DistillationData, by_cluster, read_labels
    from ddm.distillation.student import GivenImages
    from ddm.evaluation.reference import digest_of
    from ddm.images.columns import class_numbers
    from ddm.images.samples import open_image_set
    from ddm.loading.plan import PlanFiles

    opened, condition = wanted.opened, wanted.condition
    given = open_image_set(
        data, opened.plan.data, opened.plan.transform, takes_samples=True, subject="public images"
    )
    images = given.read()
    expert_N = None
    for remark in (*given.remarks, *given.range_remarks(images)):
        say(remark, error=True)
    labels = None
    if isinstance(condition, ClassCondition) and given.arrays is None:
        labels = torch.from_numpy(class_numbers(given.column("labels"), condition.classes))
    elif not isinstance(condition, NoCondition):
        labels = read_labels(data, condition)
        if len(given.count_P) == len(labels):
            labels = labels.repeat_interleave(torch.tensor(given.count_P), 0)
    if labels is not None and len(labels) != len(images):
        raise DataError("labels", expected=f"{len(images)}, one per image", got=str(len(labels)))
    if wanted.teacher is TeacherName.LABEL:
        files = PlanFiles.load(opened.plan, opened.folder)
        known_N, expert_N = by_cluster(images, files, opened.manifest.experts, wanted.training.seed)
        images, labels = images[known_N], None if labels is None else labels[known_N]
    with progress("encoding images") as tell:
        encoded = wanted.ensemble.latent.encode(images, tell)
    drop = 0.0 if isinstance(condition, NoCondition) else condition.drop
    return DistillationData(encoded, expert_N, labels, drop), GivenImages(
        num=len(encoded), digest=digest_of(given.files)
    )


def _trained(wanted: _Wanted, dataset: "DistillationData") -> "FinishedTraining":
    import torch

    from ddm.distillation.distill import distill as train_student
    from ddm.models import build_expert, load_expert

    plan = wanted.opened.plan
    network, shape, condition = wanted.network, plan.expert_shape, wanted.condition
    if wanted.start:
        student = load_expert(network, shape, *wanted.start, condition).requires_grad_(True)
    else:
        student = build_expert(network, shape, condition=condition, seed=wanted.training.seed)
    try:
        with progress("training the student") as tell, stop_on_first_signal() as stop:
            return train_student(
                wanted.ensemble,
                student,
                dataset,
                wanted.training,
                teacher=wanted.teacher.value,
                engine=Engine(device=wanted.device),
                source=wanted.source.manifest,
                checkpoint_dir=wanted.work / _CHECKPOINTS,
                on_progress=lambda reached: tell(reached.step, reached.num_steps),
                should_stop=stop.is_set,
                t_distribution=plan.t_distribution,
            )
    except SetupError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            remedy = "Ask for a smaller student (--architecture), or train without the GPU (--device cpu)."
            raise SetupError(
                error.subject, expected=error.expected, got=error.got, remedy=remedy
            ) from error
        if not error.subject.startswith("checkpoints"):
            raise
        remedy = f"Give the flags of that run, or another --out, or remove {wanted.work.name}."
        expected = "checkpoints of this release, these flags and images"
        got = "checkpoints of a run with a different release, flags or images"
        raise SetupError(
            f"checkpoints in {wanted.work.name}", expected=expected, got=got, remedy=remedy
        ) from error


def _keep(wanted: _Wanted, trained: "FinishedTraining", images: "OwnSamples | GivenImages") -> None:
    """Write the student: its autoencoder if it needs one, its weights, and last the record that names both."""
    from ddm.distillation.student import RECORD_SUFFIX, Student, autoencoder_beside
    from ddm.io.files import write_atomic
    from ddm.io.tensors import save_tensors
    from ddm.protocol.base import File

    plan, out, autoencoder = wanted.opened.plan, wanted.out, None
    if isinstance(plan.latent, Autoencoder):
        autoencoder = plan.file(plan.latent.path)
        write_atomic(
            autoencoder_beside(out), (wanted.opened.folder / autoencoder.path).read_bytes()
        )
    save_tensors(out, trained.ema)
    record = Student(
        source=wanted.source,
        images=images,
        teacher=wanted.teacher.value,
        data=plan.data,
        latent=plan.latent,
        autoencoder=autoencoder,
        condition=wanted.condition,
        architecture=wanted.network,
        path=plan.objective.ensemble_path,
        t_distribution=plan.t_distribution,
        training=wanted.training,
        base=wanted.start[1].digest if wanted.start else None,
        loss=trained.loss,
        seconds=trained.seconds,
        file=File.of("student.safetensors", out),
    )
    write_atomic(out.with_suffix(RECORD_SUFFIX), record.encode())
