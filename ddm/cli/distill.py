"""The command `ddm distill`: train one dense student on a verified release, resumably, and record its origin."""

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import (
    CheckpointSecondsOption,
    DeviceOption,
    MemoryOption,
    ReleaseArgument,
    Verification,
    check_null,
    fetch_progress,
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
from ddm.protocol.base import MAX_INTEGER
from ddm.protocol.latent import Autoencoder
from ddm.system.console import human_seconds, progress, say
from ddm.system.devices import DeviceName
from ddm.system.signals import stop_on_first_signal
from ddm.training.config import CHECKPOINT_S, Engine

if TYPE_CHECKING:
    from ddm.distillation.dataset import DistillationData
    from ddm.distillation.student import GivenImages, OwnSamples, StudentOrigin
    from ddm.ensemble import Ensemble
    from ddm.loading.release import Release
    from ddm.protocol.base import File
    from ddm.protocol.learning import Training
    from ddm.protocol.plan import Plan
    from ddm.system.memory import MemoryLimit
    from ddm.training.loop import FinishedTraining

_DEFAULT_NUM = 4096
_SOLVER_STEPS = 50  # of own samples

# The panels of the help.
_STUDENT = "The student"
_IMAGES = "Training images"
_TRAINING = "Training"

_WORK_SUFFIX = ".work"
_SAMPLES = "samples"
_CHECKPOINTS = "checkpoints"


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


StudentFileOption = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="FILE.safetensors to write; run again to continue where it stopped.",
        rich_help_panel=_STUDENT,
    ),
]
ArchitectureOption = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        metavar="FILE",
        help="TOML file with the student's architecture (default: that of the experts).",
        rich_help_panel=_STUDENT,
    ),
]
UnconditionalOption = Annotated[
    bool,
    typer.Option(
        "--unconditional",
        help="Train without a condition, although the experts have one.",
        rich_help_panel=_STUDENT,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="npz of public images with labels, or pictures (default: samples of the ensemble).",
        rich_help_panel=_IMAGES,
    ),
]
TextsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="npz of texts for the ensemble's samples; for experts with texts.",
        rich_help_panel=_IMAGES,
    ),
]
NumSamplesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_INTEGER,
        help=f"Number of samples of the ensemble (default: {_DEFAULT_NUM}).",
        rich_help_panel=_IMAGES,
    ),
]
TeacherOption = Annotated[
    TeacherName | None,
    typer.Option(
        help="Teacher (default: label without --data, drawn with it).", rich_help_panel=_TRAINING
    ),
]
StartOption = Annotated[
    StartName | None,
    typer.Option(
        help="Initial weights (default: an expert's, if the student has its architecture).",
        rich_help_panel=_TRAINING,
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_INTEGER,
        help="Number of training steps (default: as many as for an expert).",
        rich_help_panel=_TRAINING,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_INTEGER,
        help="Random seed of weights, samples and steps.",
        rich_help_panel=_TRAINING,
    ),
]


@dataclass(frozen=True)
class Distillation:
    """One student's training.

    Attributes:
        opened: the release.
        start: the weights that training starts from, as a folder and a file in it; None for random ones.
        ensemble: the teachers.
        source: what the record says about the release.
        teacher: what the student learns from.
        condition: the student's.
        network: the student's.
        training: how it is trained.
        out: the student's file.
        engine: how this machine trains it.
    """

    opened: "Release"
    start: "tuple[Path, File] | None"
    ensemble: "Ensemble"
    source: "StudentOrigin"
    teacher: TeacherName
    condition: Condition
    network: Architecture
    training: "Training"
    out: Path
    engine: Engine

    @property
    def work(self) -> Path:
        """Where samples and checkpoints are kept."""
        return self.out.with_suffix(_WORK_SUFFIX)


@dataclass(frozen=True)
class StudentOptions:
    """What the student is, and where it is written.

    Raises:
        SetupError: `--out` names no file of weights.
    """

    out: StudentFileOption
    architecture: ArchitectureOption = None
    unconditional: UnconditionalOption = False

    def __post_init__(self) -> None:
        if self.out.is_dir():
            got = f"the folder {self.out.name}"
        elif self.out.suffix != ".safetensors":
            got = self.out.name
        else:
            return
        raise SetupError("--out", expected="a file name that ends in .safetensors", got=got)


@dataclass(frozen=True)
class DistillationImages:
    """The images that the student learns from: public ones, or the ensemble's own samples.

    Raises:
        SetupError: options on the ensemble's samples together with public images.
    """

    data: DataOption = None
    texts: TextsOption = None
    num: NumSamplesOption = None

    def __post_init__(self) -> None:
        if self.data is None:
            return
        for flag, value in (("--num", self.num), ("--texts", self.texts)):
            if value is not None:
                raise SetupError(
                    flag,
                    expected=f"either {flag}, for samples of the ensemble, or --data, for public images",
                    got=f"both, with --data {self.data}",
                )

    @property
    def num_own_samples(self) -> int:
        """How many samples of the ensemble are drawn."""
        if self.data is not None:
            return 0
        return self.num or _DEFAULT_NUM


@dataclass(frozen=True)
class StudentTrainingOptions:
    """How the student is trained."""

    teacher: TeacherOption = None
    start: StartOption = None
    steps: StepsOption = None
    seed: SeedOption = 0


@grouped
def distill(
    release: ReleaseArgument,
    *,
    student: StudentOptions,
    source_images: DistillationImages,
    training: StudentTrainingOptions,
    verification: Verification,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
    checkpoint_s: CheckpointSecondsOption = CHECKPOINT_S,
) -> None:
    """Train one dense student on an ensemble's answers; verifies first."""
    # Everything that options alone can get wrong is refused before the release is read, which may take minutes.
    memory_bytes = read_memory(memory)
    out = student.out
    data = source_images.data
    texts = source_images.texts
    num_own_samples = source_images.num_own_samples
    own_architecture = None
    if student.architecture is not None:
        own_architecture = load_settings(StudentSettings, student.architecture).architecture
    teacher = training.teacher
    if teacher is None:
        # Labels are exact for samples of the ensemble itself. Public images have another law, under which only the
        # router's posterior at x_t is right (docs/explanation/distillation.md).
        teacher = TeacherName.LABEL
        if data is not None:
            teacher = TeacherName.DRAWN

    opened = verification.open(release, experts_later=True)
    if opened.hosted is not None:
        # A student learns from all of them.
        with fetch_progress(release) as advance:
            opened.fetch_experts(on_progress=advance)
    plan = opened.plan
    network = own_architecture or plan.expert.architecture
    condition = _student_condition(plan, network, texts, unconditional=student.unconditional)
    # An expert's weights are a better start than random ones where the student has the expert's form.
    start_weights = _start_weights(opened, training.start, network, condition)

    from ddm.system.memory import memory_limit

    ensemble = _load_teachers(
        opened,
        memory_limit(memory_bytes),
        beside=_training_bytes(opened, network, condition, num_own_samples),
        device=device,
    )
    training_changes = {
        "num_steps": training.steps or plan.expert.training.num_steps,
        "seed": training.seed,
        # No tokens are masked: the teacher answers about whole images.
        "mask_ratio": 0.0,
    }
    distillation = Distillation(
        opened=opened,
        start=start_weights,
        ensemble=ensemble,
        source=_source(opened),
        teacher=teacher,
        condition=condition,
        network=network,
        training=plan.expert.training.model_copy(update=training_changes),
        out=out,
        engine=Engine(device=device, checkpoint_s=checkpoint_s),
    )
    distillation.work.mkdir(parents=True, exist_ok=True)
    images: OwnSamples | GivenImages
    # Two processes would overwrite each other's checkpoints.
    with locked(distillation.work, "distillation"):
        if data is not None:
            dataset, images = _public_images(distillation, data)
        else:
            dataset, images = _own_samples(distillation, num_own_samples, texts)
        trained = _train(distillation, dataset)
        _write_student(distillation, trained, images)

    source = distillation.source
    say(
        f"Student in {out}: {len(dataset.images)} images, teacher {teacher.value}, "
        f"{distillation.training.num_steps} steps in {human_seconds(trained.seconds)}, loss {trained.loss:.4f}. "
        f"From {source.plan_id}, version {source.version}, manifest {source.manifest}."
    )
    say(f"Sample from it: ddm sample-student {quote(str(out))} --num 16 --out student.png")
    warn_if_expired(opened)


def _student_condition(
    plan: "Plan", network: Architecture, texts: Path | None, *, unconditional: bool
) -> Condition:
    """Return what the student is conditioned on: what the experts are, or nothing.

    Raises:
        SetupError: the experts never learned to do without it, the network cannot take it, or texts for a student
            without texts.
    """
    condition: Condition = plan.condition
    if unconditional:
        check_null(plan.condition, "--unconditional", "Leave --unconditional out.")
        condition = NoCondition()
    misfit = network.misfit(plan.expert_shape, condition)
    # Before the teachers are loaded, which takes minutes.
    if misfit:
        raise SetupError(
            "--architecture", expected=misfit, got=f"shape {plan.expert_shape}, {condition.kind}"
        )
    if texts is not None and not isinstance(condition, TextCondition):
        raise SetupError(
            "--texts",
            expected="a student with texts as its condition",
            got=f"condition {condition.kind}",
        )
    return condition


def _start_weights(
    opened: "Release", start: StartName | None, network: Architecture, condition: Condition
) -> "tuple[Path, File] | None":
    """Return the expert whose weights training starts from, as a folder and a file in it; None for random weights."""
    if start is StartName.RANDOM:
        return None
    weights = initial_weights(opened, network, condition)
    if start is StartName.EXPERT and weights is None:
        raise SetupError(
            "--start expert",
            expected="a student of an expert's architecture and condition, "
            "and an expert that predicts velocities on the ensemble's path",
            got="none of them",
            remedy="Leave the flag out, to start from random weights.",
        )
    return weights


def _load_teachers(
    opened: "Release", limit: "MemoryLimit", *, beside: int, device: DeviceName
) -> "Ensemble":
    """Build the ensemble, with as many experts in memory at once as fit beside the training."""
    from ddm.loading.ensemble import build_ensemble
    from ddm.loading.memory import expert_memory_bytes
    from ddm.system.devices import device_named

    # A device that does not exist is refused before sizes are.
    torch_device = device_named(device, setting="--device")
    expert_bytes = expert_memory_bytes(
        opened.plan,
        opened.manifest,
        limit,
        beside=beside,
        remedy="Ask for fewer own samples (--num) or a smaller student (--architecture), or raise --memory.",
    )
    return build_ensemble(
        opened.plan,
        opened.manifest,
        opened.folder,
        memory_bytes=expert_bytes,
        device=torch_device,
    )


def _training_bytes(
    opened: "Release", network: Architecture, condition: Condition, num_own_samples: int
) -> int:
    """Return the bytes of training a student on this many own samples, beside its teachers."""
    from ddm.footprint import labels_bytes, sampling_bytes
    from ddm.models import network_size

    plan = opened.plan
    batch = plan.expert.training.batch_size
    student = network_size(network, plan.expert_shape, condition).training_bytes(batch)
    # Samples are drawn in parts, and a step asks the teachers about one batch; the data stay in memory.
    teachers = sampling_bytes(
        plan, len(opened.manifest.experts), num=batch, batch=batch, steps=_SOLVER_STEPS
    )
    image_bytes = 4 * num_own_samples * prod(plan.expert_shape)
    # Three copies while they are drawn, written and read back.
    data = 3 * (image_bytes + labels_bytes(condition, num_own_samples))
    return student + teachers + data


def _source(opened: "Release") -> "StudentOrigin":
    from ddm.distillation.student import StudentOrigin

    return StudentOrigin(
        plan_id=opened.manifest.plan_id,
        version=opened.manifest.version,
        manifest=opened.manifest_digest,
        root=opened.verified.root_fingerprint,
    )


def _own_samples(
    distillation: Distillation, num: int, texts: Path | None
) -> "tuple[DistillationData, OwnSamples]":
    """Draw the training images from the ensemble itself."""
    from ddm.distillation.dataset import SampleRecipe, own_samples, read_labels
    from ddm.distillation.student import OwnSamples
    from ddm.protocol.base import sha256_file

    seed = distillation.training.seed
    recipe = SampleRecipe(
        source=distillation.source.manifest,
        condition=distillation.condition,
        texts=read_labels(texts, distillation.condition) if texts else None,
        seed=seed,
    )
    with progress(f"drawing {num} samples") as show_progress:
        drawn = own_samples(
            distillation.ensemble,
            num,
            distillation.work / _SAMPLES,
            recipe,
            on_progress=show_progress,
        )
    return drawn, OwnSamples(num=num, seed=seed, texts=sha256_file(texts) if texts else None)


def _public_images(
    distillation: Distillation, data: Path
) -> "tuple[DistillationData, GivenImages]":
    """Read public images, and their conditions, as training images."""
    import torch

    from ddm.distillation.dataset import DistillationData, by_cluster, read_labels
    from ddm.distillation.student import GivenImages
    from ddm.evaluation.reference import digest_of
    from ddm.images.columns import class_numbers
    from ddm.images.samples import open_image_set
    from ddm.loading.plan import PlanFiles

    opened = distillation.opened
    condition = distillation.condition
    # Samples in floating point of the plan's shape have been through the plan's transform already.
    image_set = open_image_set(
        data, opened.plan.data, opened.plan.transform, takes_samples=True, subject="public images"
    )
    images = image_set.read()
    for remark in (*image_set.remarks, *image_set.range_remarks(images)):
        say(remark, error=True)

    labels = None
    if isinstance(condition, ClassCondition) and image_set.arrays is None:
        labels = torch.from_numpy(class_numbers(image_set.column("labels"), condition.classes))
    elif not isinstance(condition, NoCondition):
        labels = read_labels(data, condition)
        # A picture from which several samples are cut gives its label to each of them.
        if len(image_set.count_P) == len(labels):
            labels = labels.repeat_interleave(torch.tensor(image_set.count_P), 0)
    if labels is not None and len(labels) != len(images):
        raise DataError(
            "labels",
            expected=f"{len(images)}, one per image",
            got=str(len(labels)),
            remedy="Give one label for each image.",
        )
    expert_N = None
    if distillation.teacher is TeacherName.LABEL:
        # Each image is labelled with the expert of its cluster; images of clusters without one are left out.
        files = PlanFiles.load(opened.plan, opened.folder)
        known_N, expert_N = by_cluster(
            images, files, opened.manifest.experts, distillation.training.seed
        )
        images = images[known_N]
        if labels is not None:
            labels = labels[known_N]
    with progress("encoding images") as show_progress:
        encoded = distillation.ensemble.latent.encode(images, show_progress)
    drop = 0.0
    if not isinstance(condition, NoCondition):
        drop = condition.drop
    dataset = DistillationData(encoded, expert_N, labels, drop)
    return dataset, GivenImages(num=len(encoded), digest=digest_of(image_set.files))


def _train(distillation: Distillation, dataset: "DistillationData") -> "FinishedTraining":
    import torch

    from ddm.distillation.distill import distill as train_student
    from ddm.models import build_expert, load_expert
    from ddm.training.loop import TrainingRun

    plan = distillation.opened.plan
    network = distillation.network
    shape = plan.expert_shape
    condition = distillation.condition
    if distillation.start is not None:
        folder, file = distillation.start
        # Experts are loaded without gradients, which only a network that is trained needs.
        student = load_expert(network, shape, folder, file, condition).requires_grad_(True)
    else:
        student = build_expert(network, shape, condition=condition, seed=distillation.training.seed)
    try:
        with progress("training the student") as show_progress, stop_on_first_signal() as stop:
            run = TrainingRun(
                checkpoint_dir=distillation.work / _CHECKPOINTS,
                on_progress=lambda reached: show_progress(reached.step, reached.num_steps),
                should_stop=stop.is_set,
                engine=distillation.engine,
            )
            return train_student(
                distillation.ensemble,
                student,
                dataset,
                distillation.training,
                run,
                teacher=distillation.teacher.value,
                source=distillation.source.manifest,
                t_distribution=plan.t_distribution,
            )
    # The training loop's remedies are for a silo's training; those below name options of this command.
    except SetupError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise SetupError(
                error.subject,
                expected=error.expected,
                got=error.got,
                remedy="Ask for a smaller student (--architecture), or train without the GPU (--device cpu).",
            ) from error
        if not error.subject.startswith("checkpoints"):
            raise
        raise SetupError(
            f"checkpoints in {distillation.work.name}",
            expected="checkpoints of this release, these flags and images",
            got="checkpoints of a run with a different release, flags or images",
            remedy=f"Give the flags of that run, or another --out, or remove {distillation.work.name}.",
        ) from error


def _write_student(
    distillation: Distillation, trained: "FinishedTraining", images: "OwnSamples | GivenImages"
) -> None:
    """Write the student: its autoencoder if it needs one, its weights, and last the record that names both."""
    from ddm.distillation.student import RECORD_SUFFIX, Student, autoencoder_beside
    from ddm.io.files import write_atomic
    from ddm.io.tensors import save_tensors
    from ddm.protocol.base import File

    plan = distillation.opened.plan
    out = distillation.out
    autoencoder = None
    if isinstance(plan.latent, Autoencoder):
        autoencoder = plan.file(plan.latent.path)
        # A student is used without its release, so that it brings the autoencoder along.
        write_atomic(
            autoencoder_beside(out), (distillation.opened.folder / autoencoder.path).read_bytes()
        )
    # The averaged weights, as experts are published too.
    save_tensors(out, trained.ema)
    record = Student(
        source=distillation.source,
        images=images,
        teacher=distillation.teacher.value,
        data=plan.data,
        latent=plan.latent,
        autoencoder=autoencoder,
        condition=distillation.condition,
        architecture=distillation.network,
        path=plan.objective.ensemble_path,
        t_distribution=plan.t_distribution,
        training=distillation.training,
        base=distillation.start[1].digest if distillation.start else None,
        loss=trained.loss,
        seconds=trained.seconds,
        file=File.of("student.safetensors", out),
    )
    # Last: a student with a record is complete.
    write_atomic(out.with_suffix(RECORD_SUFFIX), record.encode())
