"""The command `ddm distill`: one dense student from a verified release, resumable, and a record of its origin."""

from dataclasses import dataclass
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
from ddm.errors import DataError, SetupError
from ddm.protocol.plan import Architecture, AutoencoderKlLatent, Condition, NoCondition, TextCondition
from ddm.settings import Settings, load_settings

if TYPE_CHECKING:
    from ddm.ensemble import Ensemble
    from ddm.lessons import Lessons
    from ddm.protocol.plan import Training
    from ddm.release import Release
    from ddm.student import GivenImages, OwnSamples, Source
    from ddm.training import Trained

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


Data = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Public images, and what they show, npz; without, its own samples.")
]
Texts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Texts that own samples are told, npz; for experts that read them.")
]
Teacher = Annotated[TeacherName | None, typer.Option(help="Default: label without --data, drawn with it.")]
Num = Annotated[int | None, typer.Option(min=1, help=f"How many own samples; default {_DEFAULT_NUM}.")]
Unconditional = Annotated[bool, typer.Option("--unconditional", help="A student of no condition, as experts are not.")]
ArchitectureFile = Annotated[
    Path | None, typer.Option("--architecture", metavar="FILE", help="TOML; default: the experts' architecture.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps; default: as an expert.")]


@dataclass(frozen=True)
class _Wanted:
    """What was asked for, and the release to make it from."""

    opened: "Release"
    ensemble: "Ensemble"
    source: "Source"
    teacher: TeacherName
    condition: Condition
    network: Architecture
    training: "Training"
    out: Path

    @property
    def work(self) -> Path:
        """Where samples and checkpoints are kept."""
        return self.out.with_suffix(_WORK_SUFFIX)


def distill(
    release: ReleaseArgument,
    root: RootOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="FILE.safetensors; run again to go on.")],
    data: Data = None,
    texts: Texts = None,
    teacher: Teacher = None,
    num: Num = None,
    unconditional: Unconditional = False,
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
    if data and (num or texts):
        raise SetupError("--num" if num else "--texts", expected="no --data with it", got="both")
    chosen = teacher or (TeacherName.DRAWN if data else TeacherName.LABEL)
    asked = load_settings(StudentSettings, architecture).architecture if architecture else None
    opened = open_verified(release, root, state, silo_key, archived, experts_later=True)
    plan = opened.plan
    network, condition = asked or plan.expert.architecture, NoCondition() if unconditional else plan.condition
    if misfit := network.misfit(plan.expert_shape, condition):
        raise SetupError("--architecture", expected=misfit, got=f"shape {plan.expert_shape}, {condition.kind}")
    if texts and not isinstance(condition, TextCondition):
        raise SetupError("--texts", expected="a student that reads texts", got=f"condition {condition.kind}")
    # All tokens are shown: the teacher answers about whole images.
    changes = {"num_steps": steps or plan.expert.training.num_steps, "seed": seed, "mask_ratio": 0.0}
    training = plan.expert.training.model_copy(update=changes)

    import torch

    from ddm.artifact import load_ensemble

    ensemble = load_ensemble(opened, device="cuda" if torch.cuda.is_available() else "cpu")
    wanted = _Wanted(opened, ensemble, _source(opened), chosen, condition, network, training, out)
    lessons, images = _given(wanted, data) if data else _own(wanted, num or _DEFAULT_NUM, texts)
    trained = _trained(wanted, lessons)
    _keep(wanted, trained, images)
    say(
        f"Student in {out}: {len(lessons.images)} images, teacher {chosen.value}, {training.num_steps} steps in "
        f"{human_seconds(trained.seconds)}, loss {trained.loss:.4f}. From {wanted.source.plan_id}, version "
        f"{wanted.source.version}, manifest {wanted.source.manifest}."
    )
    say(f"Sample from it: ddm sample-student {out} --num 16 --out student.png")
    warn_if_expired(opened)


def _source(opened: "Release") -> "Source":
    from ddm.student import Source

    verified, manifest = opened.verified, opened.manifest
    digest = verified.files["manifest.json"].digest
    return Source(plan_id=manifest.plan_id, version=manifest.version, manifest=digest, root=verified.root_fingerprint)


def _own(wanted: _Wanted, num: int, texts: Path | None) -> "tuple[Lessons, OwnSamples]":
    """Draw what the student is shown from the ensemble itself."""
    from ddm.lessons import own_samples, read_told
    from ddm.protocol.base import sha256_file
    from ddm.student import OwnSamples

    seed = wanted.training.seed
    with progress(f"drawing {num} samples") as tell:
        drawn = own_samples(
            wanted.ensemble,
            num,
            wanted.work / _SAMPLES,
            source=wanted.source.manifest,
            condition=wanted.condition,
            texts=read_told(texts, wanted.condition) if texts else None,
            seed=seed,
            on_progress=tell,
        )
    return drawn, OwnSamples(num=num, seed=seed, texts=sha256_file(texts) if texts else None)


def _given(wanted: _Wanted, data: Path) -> "tuple[Lessons, GivenImages]":
    """Read what the student is shown from a file."""
    from ddm.lessons import Lessons, by_cluster, read_told
    from ddm.npz import read_images
    from ddm.plan_files import PlanFiles
    from ddm.protocol.base import sha256_file
    from ddm.student import GivenImages

    opened, condition = wanted.opened, wanted.condition
    images, expert_N = read_images(data, opened.plan.data), None
    told = None if isinstance(condition, NoCondition) else read_told(data, condition)
    if told is not None and len(told) != len(images):
        raise DataError("labels", expected=f"{len(images)}, one per image", got=str(len(told)))
    if wanted.teacher is TeacherName.LABEL:
        files = PlanFiles.load(opened.plan, opened.folder)
        known_N, expert_N = by_cluster(images, files, opened.manifest.experts, wanted.training.seed)
        images, told = images[known_N], None if told is None else told[known_N]
    with progress("encoding images") as tell:
        seen = wanted.ensemble.latent.encode(images, tell)
    drop = 0.0 if isinstance(condition, NoCondition) else condition.drop
    return Lessons(seen, expert_N, told, drop), GivenImages(num=len(seen), digest=sha256_file(data))


def _trained(wanted: _Wanted, lessons: "Lessons") -> "Trained":
    from ddm.distillation import distill as train_student
    from ddm.models import build_expert

    plan = wanted.opened.plan
    with progress("training the student") as tell:
        return train_student(
            wanted.ensemble,
            build_expert(wanted.network, plan.expert_shape, condition=wanted.condition, seed=wanted.training.seed),
            lessons,
            wanted.training,
            teacher=wanted.teacher.value,
            source=wanted.source.manifest,
            checkpoint_dir=wanted.work / _CHECKPOINTS,
            on_progress=lambda told: tell(told.step, told.num_steps),
            should_stop=lambda: False,
            t_distribution=plan.t_distribution,
        )


def _keep(wanted: _Wanted, trained: "Trained", images: "OwnSamples | GivenImages") -> None:
    """Write the student: its autoencoder if it needs one, its weights, and last the record that names both."""
    from ddm.files import write_atomic
    from ddm.protocol.base import File
    from ddm.student import RECORD_SUFFIX, Student, autoencoder_beside
    from ddm.tensors import save_tensors

    plan, out, autoencoder = wanted.opened.plan, wanted.out, None
    if isinstance(plan.latent, AutoencoderKlLatent):
        autoencoder = plan.file(plan.latent.path)
        write_atomic(autoencoder_beside(out), (wanted.opened.folder / autoencoder.path).read_bytes())
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
        path=plan.objective.path,
        t_distribution=plan.t_distribution,
        training=wanted.training,
        loss=trained.loss,
        seconds=trained.seconds,
        file=File.of(out.name, out),
    )
    write_atomic(out.with_suffix(RECORD_SUFFIX), record.encode())
