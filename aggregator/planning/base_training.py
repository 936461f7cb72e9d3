"""Trains the base of a recipe on its public images, as a job like that of an expert, and writes its card.

    FOLDER/base.safetensors    the averaged weights
    FOLDER/base.json           its card, written last: `ddm.planning.trained_base.TrainedBaseCard`
    FOLDER/README.md           the same for readers
    FOLDER/job/                what training continues from; goes with the card

The images that the plan holds out to judge routers and experts are held out from the base too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from ddm.errors import SetupError
from ddm.images.columns import class_numbers
from ddm.images.rows import Images
from ddm.images.samples import ImageSet
from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.models import network_size
from ddm.pages.render import render
from ddm.planning.fit import divide, fit_latent
from ddm.planning.networks import RecipeNetworks, autoencoder_digest, shape_after
from ddm.planning.recipe import SharedRecipe, TrainedBaseRecipe
from ddm.planning.trained_base import CARD_NAME, WEIGHTS_NAME, TrainedBaseCard, images_digest
from ddm.protocol.architecture import (
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, now_utc, sha256_hex
from ddm.protocol.data import DataSpec
from ddm.protocol.encoder import PcaEncoderSpec
from ddm.protocol.enrolment import AgreedSize
from ddm.protocol.latent import Autoencoder, IdentityLatent, LatentSpec
from ddm.protocol.learning import Expert, ExpertObjective, Objective
from ddm.protocol.limits import Audit, SubmissionLimits
from ddm.protocol.partition import Clustering, SiloPartition, SketchSpec
from ddm.protocol.plan import Plan
from ddm.protocol.routers import CountsSettings
from ddm.protocol.statistics import EXACT, Budget, CountsStatistic, Statistics
from ddm.system.progress import ProgressCallback
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder, discard_job
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.planned import PlannedExpert
from ddm.training.progress import Progress

_MEMBER = "base"
_PAGE_NAME = "README.md"
_JOB_NAME = "job"
_HEADER_BYTES = 1 << 20
_NO_LIMIT_S = 10**9
_NO_LIMIT_HOURS = 1e6
# Fixed, so that a training that is started again has the same plan, and finds its checkpoint.
_CREATED_AT = datetime(2000, 1, 1, tzinfo=UTC)
_EXPIRES_AT = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class BaseImages:
    """What a base learns.

    Attributes:
        x_0: the public images that plans are fitted on, as the network sees them, shape (N, ...).
        classes: the class of each, int64; None for a base without classes.
        latent: what the network sees of an image.
        autoencoder: sha256 of the autoencoder's weights as a plan has them; None on pixels.
        condition: the condition of the base.
        public_digest: sha256 of the images before an autoencoder encodes them.
    """

    x_0: Tensor
    classes: Tensor | None
    latent: IdentityLatent | Autoencoder
    autoencoder: str | None
    condition: Condition
    public_digest: str

    @property
    def digest(self) -> str:
        """The digest that identifies these images, in this form."""
        if self.classes is None:
            return images_digest(self.x_0)
        return images_digest(self.x_0, self.classes)


def trained_base_of(recipe: SharedRecipe) -> TrainedBaseRecipe:
    """Return what a recipe says about a base to train.

    Raises:
        SetupError: it names none.
    """
    if isinstance(recipe.base, TrainedBaseRecipe):
        return recipe.base
    raise SetupError(
        "recipe, base.kind",
        expected="trained, with the tables [base] and [base.training]",
        got="no base" if recipe.base is None else recipe.base.kind,
        remedy="See docs/how-to/start-from-a-base.md, Train one on public images.",
    )


def read_base_images(
    image_set: ImageSet,
    recipe: SharedRecipe,
    networks: RecipeNetworks,
    on_progress: ProgressCallback | None = None,
) -> BaseImages:
    """Read the public images that plans are fitted on, as experts of the recipe see them.

    Raises:
        SetupError: an architecture that needs samples of another shape.
        DataError, MissingFileError: images or classes that do not fit the recipe.
    """
    condition = _condition(recipe, networks)
    architecture = recipe.expert.architecture
    shape = shape_after(networks.autoencoder, recipe.data.shape)
    misfit = architecture.misfit(shape, condition)
    if misfit is not None:
        raise SetupError("recipe, expert.architecture", expected=misfit, got=architecture.kind)
    public = image_set.read()
    fitted_rows, holdout_rows = divide(len(public), recipe.public)
    classes = None
    if isinstance(condition, ClassCondition):
        labels = class_numbers(image_set.column("labels"), condition.classes, "column labels")
        classes = torch.from_numpy(labels)[fitted_rows]
    fitted = public[fitted_rows]
    space = fit_latent(networks, fitted, public[holdout_rows], on_progress)
    x_0 = fitted
    if space.latents is not None:
        x_0, _ = space.latents
    autoencoder = autoencoder_digest(networks.autoencoder)
    return BaseImages(
        x_0.contiguous(), classes, space.spec, autoencoder, condition, images_digest(fitted)
    )


def check_base_architecture(recipe: SharedRecipe) -> None:
    """Refuse an architecture of which no base can be trained, by the recipe alone.

    Raises:
        SetupError: an mmdit, or another architecture than a dit with texts.
    """
    architecture = recipe.expert.architecture
    has_texts = recipe.condition.kind == "text"
    match architecture:
        case Mmdit():
            reason = "mmdit, which always reads one"
            remedy = (
                'Choose a dit, or start from a checkpoint of diffusers: base.kind = "diffusers".'
            )
        case Unet() if has_texts:
            reason = "unet, to which no plan adds the layers that read one"
            remedy = "Choose a dit."
        case Unet() | Dit():
            return
        case _:
            assert_never(architecture)
    expected = "a dit: a base is trained without texts, and only a dit learns to read them later"
    if not has_texts:
        expected = "a dit or a unet: a base is trained without texts"
    raise SetupError("recipe, expert.architecture", expected=expected, got=reason, remedy=remedy)


def check_base_folder(recipe: SharedRecipe) -> None:
    """Refuse a folder that holds other things than a base: its README.md would be replaced.

    Raises:
        SetupError: it is neither empty nor that of a base, finished or not; or it is a file.
    """
    folder = Path(trained_base_of(recipe).folder)
    # A finished base is only read, whatever lies beside it.
    if (folder / CARD_NAME).exists():
        return
    names = {WEIGHTS_NAME, _JOB_NAME}
    # The page of a base is written after its weights.
    if (folder / WEIGHTS_NAME).exists():
        names.add(_PAGE_NAME)
    got = None
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            # Hidden files, such as the lock, are never replaced.
            if path.name not in names and not path.name.startswith("."):
                got = f"a folder with {path.name}"
                break
    elif folder.exists():
        got = "a file"
    if got is not None:
        raise SetupError(
            f"recipe, base.folder {folder}",
            expected="a new or empty folder, or that of a base",
            got=got,
            remedy="Name another folder in [base].",
        )


def _condition(recipe: SharedRecipe, networks: RecipeNetworks) -> Condition:
    """Return what the base is conditioned on: the recipe's classes; texts are added when a plan starts from it."""
    if trained_base_of(recipe).unconditional or isinstance(networks.condition, TextCondition):
        return NoCondition()
    return networks.condition


def train_base(
    recipe: SharedRecipe,
    images: BaseImages,
    root_digest: str,
    settings: TrainingSettings,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainedBaseCard:
    """Train a base, or continue where an earlier process stopped; a base that is finished is returned as it is.

    Args:
        recipe: the recipe with the base to train.
        images: what it learns.
        root_digest: the digest of the federation's first root.
        settings: device, processes and launcher, as of an expert's training.
        on_progress: called every few steps.
        should_stop: once it returns true the training stops after a checkpoint.

    Raises:
        BusyError: another process trains it.
        SetupError: the folder has a finished base of another recipe or of other images.
        KeyboardInterrupt: `should_stop` returned true.
    """
    folder = Path(trained_base_of(recipe).folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = _job_plan(recipe, images, root_digest)
    expert = PlannedExpert(plan, _MEMBER, 0, None, settings.engine)
    inputs: dict[str, Images] = {"images": images.x_0}
    if images.classes is not None:
        inputs["labels"] = images.classes
    job = JobFolder(folder.absolute() / _JOB_NAME)
    if settings.jobs is not None:
        # Machines of a cluster see this folder, and perhaps not the base's. Bases of other recipes are beside it, which
        # may learn the same images.
        job = JobFolder(settings.jobs / f"base-{plan.digest[:16]}")
    with locked(folder, "training"):
        if (folder / CARD_NAME).exists():
            card = _finished_card(folder, recipe, plan, images)
            # Left by a process that ended after it wrote the card.
            discard_job(job)
            return card
        result = train_job(
            TrainingTask(expert, inputs, images.digest),
            job,
            settings,
            folder / WEIGHTS_NAME,
            on_progress=on_progress,
            should_stop=should_stop,
        )
        card = TrainedBaseCard(
            created_at=now_utc(),
            **_stated_fields(recipe, plan, images),
            steps=result.steps,
            loss=result.loss,
            seconds=result.seconds,
            file=File.of(WEIGHTS_NAME, folder / WEIGHTS_NAME),
        )
        page = render("aggregator", "base.md.jinja", card=card)
        write_atomic(folder / _PAGE_NAME, page.encode())
        # Last: a folder with a card has all that the card names.
        write_atomic(folder / CARD_NAME, card.encode())
        discard_job(job)
    return card


def _stated_fields(recipe: SharedRecipe, plan: Plan, images: BaseImages) -> dict[str, Any]:
    """Return what recipe and images determine of a base's card."""
    chosen = trained_base_of(recipe)
    return {
        "licence": chosen.licence,
        "source": chosen.source,
        "images_digest": images.digest,
        "public_digest": images.public_digest,
        "num_images": len(images.x_0),
        "shape": plan.expert_shape,
        "range": recipe.data.range,
        "latent": images.latent,
        "autoencoder": images.autoencoder,
        "condition": images.condition,
        "architecture": plan.expert.architecture,
        "objective": _objective(recipe),
        "t_distribution": recipe.t_distribution,
        "training": plan.expert.training,
    }


def _finished_card(
    folder: Path, recipe: SharedRecipe, plan: Plan, images: BaseImages
) -> TrainedBaseCard:
    """Read the card of a finished base, which must be the one that the recipe asks for."""
    data = read_bounded(folder / CARD_NAME, MAX_DOCUMENT_BYTES)
    card = TrainedBaseCard.parse(data, subject=CARD_NAME)
    fields = _stated_fields(recipe, plan, images)
    differing = [name for name, value in fields.items() if getattr(card, name) != value]
    if differing:
        raise SetupError(
            str(folder),
            expected="no base yet, or the finished one of this recipe and these images",
            got=f"a finished base whose card differs in {', '.join(differing)}",
            remedy="Choose another folder in [base], or remove this one.",
        )
    return card


def _objective(recipe: SharedRecipe) -> ExpertObjective:
    return ExpertObjective(path=recipe.objective.path, prediction=recipe.objective.prediction)


def _job_plan(recipe: SharedRecipe, images: BaseImages, root_digest: str) -> Plan:
    """Return the plan of the job, which nobody signs: of it, training reads the expert, its objective and shape.

    A job is described by a plan (docs/adr/0048). The public parts that a plan lists have no part in training.
    """
    chosen = trained_base_of(recipe)
    architecture = recipe.expert.architecture
    shape = tuple(images.x_0.shape[1:])
    no_content = sha256_hex(b"")
    encoder = PcaEncoderSpec(dim=1)
    clustering = Clustering(path="plan/centroids.safetensors", num_fine=1, num_coarse=1)
    sketch = SketchSpec(path="plan/sketch.safetensors", rank=1)
    latent: LatentSpec = IdentityLatent()
    size = network_size(architecture, shape, images.condition)
    num_images = len(images.x_0)
    return Plan(
        root_digest=root_digest,
        plan_id=f"base-{images.digest[:8]}",
        created_at=_CREATED_AT,
        expires_at=_EXPIRES_AT,
        licence=chosen.licence,
        silos=(_MEMBER,),
        agreed={_MEMBER: AgreedSize(images=max(2, num_images))},
        receipt_key=f"ed25519:{no_content}",
        files=tuple(
            File(path=path, bytes=1, digest=no_content)
            for path in (clustering.path, encoder.path, sketch.path)
        ),
        # What the network sees is all that there is here: a base on latents learns them as they are.
        data=DataSpec(shape=shape, range=recipe.data.range),
        latent=latent,
        encoder=encoder,
        clustering=clustering,
        sketch=sketch,
        partition=SiloPartition(min_images=1),
        objective=Objective(path=recipe.objective.path, prediction=recipe.objective.prediction),
        t_distribution=recipe.t_distribution,
        condition=images.condition,
        expert=Expert(architecture=architecture, training=chosen.training.plain(architecture)),
        statistics=Statistics(
            unit="image",
            relation="none",
            total=Budget(epsilon=EXACT, delta=0.0),
            counts=CountsStatistic(epsilon=EXACT, num_groups=1),
        ),
        router=CountsSettings(),
        audit=Audit(required=False, min_holdout_units=1, max_near_copy_rate=1.0, max_mia_auc=1.0),
        limits=SubmissionLimits(
            expert_bytes=size.bytes + _HEADER_BYTES,
            statistic_bytes=1,
            train_s=_NO_LIMIT_S,
            gpu_hours=_NO_LIMIT_HOURS,
        ),
    )
