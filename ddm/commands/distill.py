"""The command `ddm distill`: one dense student from a verified release, resumable, and a record of its origin."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.commands.options import (
    ArchivedOption,
    ReleaseArgument,
    RootOption,
    SiloKeyOption,
    StateOption,
    open_verified,
    warn_if_expired,
)
from ddm.console import human_seconds, progress, say
from ddm.errors import SetupError
from ddm.protocol.plan import Architecture, NoCondition
from ddm.settings import Settings, load_settings

if TYPE_CHECKING:
    from ddm.distillation import Distilled
    from ddm.ensemble import Ensemble
    from ddm.lessons import Lessons
    from ddm.protocol.plan import Plan, Training
    from ddm.release import Release
    from ddm.student import GivenImages, OwnSamples, Source

_DEFAULT_NUM = 4096
_WORK_SUFFIX, _SAMPLES, _CHECKPOINTS = ".work", "samples", "checkpoints"


class TeacherName(StrEnum):
    """Who answers at x_t."""

    LABEL = "label"
    DRAWN = "drawn"
    MIXTURE = "mixture"


class StudentSettings(Settings):
    """The file of `--architecture`."""

    architecture: Architecture


Data = Annotated[Path | None, typer.Option(metavar="FILE", help="Public images, npz; without, its own samples.")]
Teacher = Annotated[TeacherName | None, typer.Option(help="Default: label without --data, drawn with it.")]
Num = Annotated[int | None, typer.Option(min=1, help=f"How many own samples; default {_DEFAULT_NUM}.")]
ArchitectureFile = Annotated[
    Path | None, typer.Option("--architecture", metavar="FILE", help="TOML; default: the experts' architecture.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps; default: as an expert.")]


def distill(
    release: ReleaseArgument,
    root: RootOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="FILE.safetensors; run again to go on.")],
    data: Data = None,
    teacher: Teacher = None,
    num: Num = None,
    architecture: ArchitectureFile = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, samples and steps.")] = 0,
    state: StateOption = None,
    silo_key: SiloKeyOption = None,
    archived: ArchivedOption = False,
) -> None:
    """Train one dense student on an ensemble's answers; verifies first."""
    if out.suffix != ".safetensors":
        raise SetupError("--out", expected="a file name that ends in .safetensors", got=out.name)
    if data and num:
        raise SetupError("--num", expected="no --data with it", got="both")
    chosen = teacher or (TeacherName.DRAWN if data else TeacherName.LABEL)
    asked = load_settings(StudentSettings, architecture).architecture if architecture else None
    opened = open_verified(release, root, state, silo_key, archived, experts_later=True)
    plan = opened.plan
    network = asked or plan.expert.architecture
    if misfit := network.misfit(plan.data.shape, NoCondition()):
        raise SetupError("--architecture", expected=misfit, got=f"samples of shape {plan.data.shape}")
    if plan.latent.kind != "identity":
        raise SetupError("ddm distill", expected="experts that work on pixels", got=f"latents, {plan.latent.kind}")

    from ddm.artifact import load_ensemble
    from ddm.files import write_atomic
    from ddm.protocol.base import File
    from ddm.student import RECORD_SUFFIX, Student

    work = out.with_suffix(_WORK_SUFFIX)
    work.mkdir(parents=True, exist_ok=True)
    ensemble, source = load_ensemble(opened), _source(opened)
    lessons, images = _lessons(opened, ensemble, source, chosen, data, num or _DEFAULT_NUM, seed, work / _SAMPLES)
    # All tokens are shown: the teacher answers about whole images.
    changes = {"num_steps": steps or plan.expert.training.num_steps, "seed": seed, "mask_ratio": 0.0}
    training = plan.expert.training.model_copy(update=changes)
    trained = _trained(plan, ensemble, lessons, network, training, chosen, source, out)
    record = Student(
        source=source,
        images=images,
        teacher=chosen.value,
        data=plan.data,
        architecture=network,
        path=plan.objective.path,
        t_distribution=plan.t_distribution,
        training=training,
        loss=trained.loss,
        seconds=trained.seconds,
        file=File.of(out.name, out),
    )
    write_atomic(out.with_suffix(RECORD_SUFFIX), record.encode())
    say(
        f"Student in {out}: {len(lessons.images)} images, teacher {chosen.value}, {training.num_steps} steps in "
        f"{human_seconds(trained.seconds)}, loss {trained.loss:.4f}. From {source.plan_id}, version {source.version}, "
        f"manifest {source.manifest}."
    )
    warn_if_expired(opened)


def _trained(
    plan: "Plan",
    ensemble: "Ensemble",
    lessons: "Lessons",
    network: Architecture,
    training: "Training",
    teacher: TeacherName,
    source: "Source",
    out: Path,
) -> "Distilled":
    """Train the student and write its weights."""
    from ddm.distillation import distill as train_student
    from ddm.models import build_expert
    from ddm.tensors import save_tensors

    with progress("training the student") as tell:
        trained = train_student(
            ensemble,
            build_expert(network, plan.data.shape, seed=training.seed),
            lessons,
            training,
            teacher=teacher.value,
            source=source.manifest,
            checkpoint_dir=out.with_suffix(_WORK_SUFFIX) / _CHECKPOINTS,
            on_progress=lambda told: tell(told.step, told.num_steps),
            should_stop=lambda: False,
            t_distribution=plan.t_distribution,
        )
    save_tensors(out, trained.ema)
    return trained


def _source(opened: "Release") -> "Source":
    from ddm.student import Source

    verified, manifest = opened.verified, opened.manifest
    digest = verified.files["manifest.json"].digest
    return Source(plan_id=manifest.plan_id, version=manifest.version, manifest=digest, root=verified.root_fingerprint)


def _lessons(
    opened: "Release",
    ensemble: "Ensemble",
    source: "Source",
    teacher: TeacherName,
    data: Path | None,
    num: int,
    seed: int,
    folder: Path,
) -> "tuple[Lessons, OwnSamples | GivenImages]":
    """What the student is shown, and what its record says of it."""
    from ddm.lessons import Lessons, by_cluster, own_samples
    from ddm.npz import read_images
    from ddm.plan_files import PlanFiles
    from ddm.protocol.base import sha256_file
    from ddm.student import GivenImages, OwnSamples

    if data is None:
        with progress(f"drawing {num} samples") as tell:
            drawn = own_samples(ensemble, num, folder, source=source.manifest, seed=seed, on_progress=tell)
        return drawn, OwnSamples(num=num, seed=seed)
    lessons = Lessons(read_images(data, opened.plan.data))
    if teacher is TeacherName.LABEL:
        files = PlanFiles.load(opened.plan, opened.folder)
        lessons = by_cluster(lessons.images, files, opened.manifest.experts, seed)
    return lessons, GivenImages(num=len(lessons.images), digest=sha256_file(data))
