"""Divides one owner's data set into islands, each a folder that can be trained by itself, and signs the plan of all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ddm.errors import BusyError, DataError, SetupError
from ddm.io.files import move_into_place, staging_folder, write_atomic
from ddm.io.modes import private_folder
from ddm.io.space import require_free_space
from ddm.io.tensors import save_tensors
from ddm.islands.arrays import write_rows
from ddm.islands.data import Dataset
from ddm.islands.folder import SPLIT_NAME, Islands, Split, SplitIsland
from ddm.islands.keys import make_keys, make_root, sign_first_plan
from ddm.islands.recipe import IslandsRecipe
from ddm.islands.released_base import open_released_base
from ddm.islands.seed import SeedBudget, divide_budget
from ddm.models import network_size
from ddm.planning.bases import check_licence
from ddm.planning.document import plan_of
from ddm.planning.fit import PublicParts, divide, fit_public_parts
from ddm.planning.networks import open_networks
from ddm.planning.recipe import SeedBaseRecipe, TextRecipe
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.protocol.enrolment import AgreedSize
from ddm.protocol.learning import FullAdaptation
from ddm.protocol.limits import Audit, SubmissionLimits
from ddm.protocol.partition import SiloPartition
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesSettings
from ddm.protocol.statistics import EXACT, Budget, ClassCountsStatistic, CountsStatistic, Statistics
from ddm.system.progress import ProgressCallback
from ddm.system.version import software_versions

# Shape legend: N images, K islands, G groups of fine centroids, C classes.

MIN_ISLANDS = 2
MAX_ISLANDS = 1024
_PLAN_LIFE = timedelta(days=5 * 365)
_BLOCK_IMAGES = 4096
# Above the tensors themselves, for the header of the safetensors file with their names and shapes.
_HEADER_BYTES = 1 << 20
_FLOAT32_BYTES = 4
# A plan needs limits; an owner's machine has none.
NO_LIMIT_S = 10**10
NO_LIMIT_HOURS = 1e7


@dataclass(frozen=True)
class Division:
    """Which island each image belongs to.

    Attributes:
        by: clusters, random, or the name of a column.
        island_N: the number of each image's island, int64.
        values: the column's value of each island; empty for clusters and random.
    """

    by: str
    island_N: Tensor
    values: tuple[str, ...] = ()

    @property
    def column(self) -> str | None:
        """The column, None for clusters and random."""
        if self.by in ("clusters", "random"):
            return None
        return self.by

    @property
    def num_islands(self) -> int:
        """How many islands there are."""
        return int(self.island_N.max()) + 1

    @property
    def size_K(self) -> list[int]:
        """The number of images of each island."""
        sizes: list[int] = torch.bincount(self.island_N, minlength=self.num_islands).tolist()
        return sizes


@dataclass(frozen=True)
class DividedData:
    """A data set with its division, and what encoder and clusters say about it.

    Attributes:
        dataset: the images.
        recipe: how they are divided, and what is trained on them.
        parts: encoder, clusters and sketch, fitted on some of the images.
        fitted_rows: the images on which these were fitted, ascending.
        fine_N: the fine centroid of each image.
        division: the island of each.
        budget: how training is divided between a seed and the islands; None without a seed.
    """

    dataset: Dataset
    recipe: IslandsRecipe
    parts: PublicParts
    fitted_rows: Tensor
    fine_N: Tensor
    division: Division
    budget: SeedBudget | None = None

    @property
    def group_N(self) -> Tensor:
        """The group of fine centroids of each image."""
        return self.parts.clusters.group_F[self.fine_N]


def split(
    dataset: Dataset,
    recipe: IslandsRecipe,
    num_islands: int | None,
    by: str,
    out: Path,
    passphrase: bytes,
    on_progress: ProgressCallback | None = None,
) -> Split:
    """Divide a data set and write the folder of its islands.

    Args:
        dataset: the images.
        recipe: how they are divided, and what is trained on them.
        num_islands: how many islands; None takes `clustering.num_coarse`, or one for each value of a column.
        by: clusters of features, random, or the name of a column.
        out: where nothing exists yet; it appears whole or not at all.
        passphrase: encrypts the keys that are made.
        on_progress: called with images encoded and images in all.

    Raises:
        BusyError: something exists at `out`.
        SetupError: fewer than two islands, or another number than the column has values; or a seed whose batches are no
            part of the islands'.
        DataError: an island with too few images, an image without a value in the column, or images, labels or captions
            that do not fit the recipe.
        DiskError: too little free space.
        TrustError, FormatError: a base of an earlier release that does not verify.
    """
    _check_absent(out)
    # A column is read before anything is fitted, which takes minutes.
    column_division = None
    if by not in ("clusters", "random"):
        column_division = _divide_by_column(dataset, by, num_islands)
        num_islands = column_division.num_islands
    recipe = _with_islands(recipe, num_islands, by)
    budget = _divide_training(recipe, num_islands or recipe.clustering.num_coarse)
    with staging_folder(out.absolute()) as staged:
        islands = Islands(staged)
        # Images and keys: nobody else on the machine may read them.
        private_folder(staged)
        fitted_rows = _choose_fitted(len(dataset.images), recipe)
        networks = open_networks(recipe, open_released_base(recipe))
        check_licence(networks.base, recipe.owner.licence)
        parts = fit_public_parts(
            recipe, networks, dataset.images[fitted_rows], islands.bundle, on_progress
        )
        fine_N = _assign_fine(dataset.images, parts, on_progress)
        division = column_division or _divide_by_recipe(recipe, parts, fine_N, by, num_islands)
        _check_sizes(division, recipe)
        data = DividedData(dataset, recipe, parts, fitted_rows, fine_N, division, budget)

        # Keys are opened again only to assemble, so that the folder can be trained on a cluster without them
        # (docs/adr/0028).
        public_key = make_keys(islands, passphrase)
        # The root of trust and the log begin here; every release of these islands is verified from it.
        root_digest = make_root(islands, recipe.owner.name, passphrase)
        plan = _draft_plan(data, str(public_key), root_digest, islands.bundle)
        _write_islands(islands, plan, data, on_progress)
        _write_router_inputs(islands, data)
        if budget is None:
            sign_first_plan(islands, plan, recipe.owner.name, passphrase)
        else:
            # The plan of the islands names the seed's digest, so that it is signed once the seed is there, by
            # `ddm assemble` (docs/adr/0092).
            islands.seed.path.mkdir()
            write_atomic(islands.seed.plan, plan.encode())
        record = _split_record(data, plan)
        write_atomic(staged / SPLIT_NAME, record.encode())
        # An empty folder is allowed there, and would be in the way of the rename.
        if out.exists():
            out.rmdir()
        move_into_place(staged, out)
    return record


def _check_absent(out: Path) -> None:
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty_folder:
        raise BusyError(
            str(out),
            expected="a path where nothing exists",
            got="a folder or a file",
            remedy="Choose another folder; one that was split is never overwritten.",
        )


def _divide_by_column(dataset: Dataset, column: str, num_islands: int | None) -> Division:
    """Give each value of a column an island of its own, in the order of the values."""
    value_N = dataset.values(column).require_complete(f"column {column}")
    values = sorted(set(value_N), key=_value_order)
    num_values = len(values)
    if not MIN_ISLANDS <= num_values <= MAX_ISLANDS or num_islands not in (None, num_values):
        expected = f"{MIN_ISLANDS} to {MAX_ISLANDS} values"
        if num_islands is not None:
            expected = f"{num_islands} values, as many as --islands"
        raise SetupError(f"column {column}", expected=expected, got=f"{num_values}")
    number_of = {value: number for number, value in enumerate(values)}
    # Numbered in the order of the values, so that the same column gives the same islands.
    island_N = np.array([number_of[value] for value in value_N], dtype=np.int64)
    return Division(column, torch.from_numpy(island_N), tuple(values))


def _value_order(value: str) -> tuple[bool, float, str]:
    """Return what sorts numbers by their size, before texts."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


def _with_islands(recipe: IslandsRecipe, num_islands: int | None, by: str) -> IslandsRecipe:
    """Return the recipe with as many coarse clusters as islands, where these are the clusters."""
    num_coarse = num_islands or recipe.clustering.num_coarse
    if not MIN_ISLANDS <= num_coarse <= MAX_ISLANDS:
        raise SetupError(
            "--islands",
            expected=f"{MIN_ISLANDS} to {MAX_ISLANDS}",
            got=str(num_coarse),
            remedy="Give a number in this range as --islands.",
        )
    if by != "clusters":
        return recipe
    clustering = recipe.clustering.model_copy(update={"num_coarse": num_coarse})
    return recipe.model_copy(update={"clustering": clustering})


def _divide_training(recipe: IslandsRecipe, num_islands: int) -> SeedBudget | None:
    """Divide the training between a seed and the islands; None for a recipe without a seed."""
    if not isinstance(recipe.base, SeedBaseRecipe):
        return None
    training = recipe.expert.training
    return divide_budget(training, recipe.base.share, num_islands, recipe.base.batch_size)


def _choose_fitted(num_images: int, recipe: IslandsRecipe) -> Tensor:
    """Return the images that encoder, clusters, sketch and router are fitted on, ascending."""
    max_images = recipe.owner.fit_images
    if num_images <= max_images:
        return torch.arange(num_images)
    generator = torch.Generator().manual_seed(recipe.public.seed)
    order_N = torch.randperm(num_images, generator=generator)
    return order_N[:max_images].sort().values


def _assign_fine(
    images: Tensor, parts: PublicParts, on_progress: ProgressCallback | None
) -> Tensor:
    """Return the fine centroid of each image."""
    assigned: list[Tensor] = []
    for first in range(0, len(images), _BLOCK_IMAGES):
        block = images[first : first + _BLOCK_IMAGES]
        assigned.append(parts.clusters.assign(parts.network.encode(block)))
        if on_progress:
            on_progress(first + len(block), len(images))
    return torch.cat(assigned)


def _divide_by_recipe(
    recipe: IslandsRecipe, parts: PublicParts, fine_N: Tensor, by: str, num_islands: int | None
) -> Division:
    """Divide by clusters of features, or at random into islands of equal size."""
    if by == "clusters":
        return Division(by, parts.clusters.coarse_F[fine_N])
    generator = torch.Generator().manual_seed(recipe.public.seed)
    order_N = torch.randperm(len(fine_N), generator=generator)
    # A random order modulo the number of islands: sizes differ by one at most.
    return Division(by, order_N % (num_islands or recipe.clustering.num_coarse))


def _check_sizes(division: Division, recipe: IslandsRecipe) -> None:
    """Refuse islands with too few images.

    Raises:
        DataError: names the smallest one.
    """
    # An island's document states at least two images; the recipe may ask for more.
    min_images = max(2, recipe.partition.min_images)
    small_islands = [
        (size, number) for number, size in enumerate(division.size_K) if size < min_images
    ]
    if not small_islands:
        return
    size, number = min(small_islands)
    got = f"{size}"
    if len(small_islands) > 1:
        got += f"; {len(small_islands)} islands have too few"
    raise DataError(
        f"island {number}",
        expected=f"at least {min_images} images (partition.min_images)",
        got=got,
        remedy="Ask for fewer islands, set clustering.balanced = true, or lower partition.min_images.",
    )


def island_names(num: int) -> list[str]:
    """Return the islands' names, whose order is that of their numbers."""
    num_digits = len(str(num - 1))
    return [f"island{number:0{num_digits}d}" for number in range(num)]


def _draft_plan(data: DividedData, receipt_key: str, root_digest: str, folder: Path) -> Plan:
    """Return the plan of one owner: exact counts that stay private, no budget, no audit, no limit on time.

    Where islands start from a seed, it is the plan by which the seed is trained.
    """
    recipe = data.recipe
    condition = data.parts.condition
    class_counts = None
    if isinstance(condition, ClassCondition):
        class_counts = ClassCountsStatistic(epsilon=EXACT, num_classes=condition.num_classes)

    expert_shape = data.parts.latent.shape(recipe.data.shape)
    architecture = recipe.expert.architecture
    # What experts see is known only now, where an autoencoder encodes the images.
    misfit = architecture.misfit(expert_shape, condition)
    if misfit:
        raise SetupError(
            f"recipe, expert.architecture, {architecture.kind}",
            expected=misfit,
            got=f"images of shape {expert_shape}, condition {condition.kind}",
        )
    expert = recipe.expert
    if data.budget is not None:
        # The seed itself starts from random weights.
        update = {"adaptation": FullAdaptation(), "training": data.budget.seed}
        expert = expert.model_copy(update=update)
    expert_size = network_size(architecture, expert_shape, condition)
    sizes = data.division.size_K
    names = island_names(len(sizes))
    return plan_of(
        recipe,
        data.parts,
        folder,
        name=recipe.owner.name,
        root_digest=root_digest,
        valid_for=_PLAN_LIFE,
        licence=recipe.owner.licence,
        silos=tuple(names),
        # Each island counts as exactly its number of images.
        agreed={name: AgreedSize(images=size) for name, size in zip(names, sizes, strict=True)},
        receipt_key=receipt_key,
        expert=expert,
        partition=SiloPartition(min_images=recipe.partition.min_images),
        statistics=Statistics(
            unit="image",
            relation="none",
            # Readers expect an epsilon; beside the relation "none" it promises nothing (docs/adr/0028).
            total=Budget(epsilon=EXACT, delta=0.0),
            counts=CountsStatistic(epsilon=EXACT, num_groups=recipe.num_groups),
            class_counts=class_counts,
        ),
        # Nothing leaves an owner, so that there is no audit, and no statistic is sent; both are fields that a plan must
        # have.
        audit=Audit(required=False, min_holdout_units=1, max_near_copy_rate=1.0, max_mia_auc=1.0),
        limits=SubmissionLimits(
            expert_bytes=expert_size.bytes + _HEADER_BYTES,
            statistic_bytes=1,
            train_s=NO_LIMIT_S,
            gpu_hours=NO_LIMIT_HOURS,
        ),
    )


def _write_islands(
    islands: Islands, plan: Plan, data: DividedData, on_progress: ProgressCallback | None
) -> None:
    """Write each island's images as its expert sees them, and their conditions."""
    num_images = len(data.dataset.images)
    values_per_image = prod(plan.expert_shape)
    if isinstance(plan.condition, TextCondition):
        values_per_image += plan.condition.max_tokens * plan.condition.dim
    needed = _FLOAT32_BYTES * num_images * values_per_image
    # Before the encoding, which takes long and would fail at its end.
    require_free_space({islands.path: needed}, "the islands' images")

    conditions = _read_conditions(data.dataset, plan.condition)
    num_encoded = 0

    # One block at a time, so that the latents of an island are never in memory as a whole.
    def encode_blocks(rows: Tensor) -> Iterator[np.ndarray]:
        nonlocal num_encoded
        for block in torch.split(rows, _BLOCK_IMAGES):
            yield data.parts.autoencoder.encode(data.dataset.images[block]).numpy()
            num_encoded += len(block)
            if on_progress:
                on_progress(num_encoded, num_images)

    for number in range(len(plan.silos)):
        folder = islands.island(number)
        rows = torch.nonzero(data.division.island_N == number)[:, 0]
        write_rows(folder.rows, (len(rows),), [rows.numpy()], np.int64)
        write_rows(folder.images, (len(rows), *plan.expert_shape), encode_blocks(rows))
        if conditions is not None:
            _write_conditions(folder.labels, conditions[rows.numpy()], data.recipe, plan.condition)


def _read_conditions(dataset: Dataset, condition: Condition) -> np.ndarray | None:
    """Return the class or the caption of every image; None where experts have no condition."""
    if isinstance(condition, ClassCondition):
        return dataset.classes(condition.classes)
    if isinstance(condition, TextCondition):
        return np.array(dataset.captions())
    return None


def _write_conditions(
    path: Path, conditions: np.ndarray, recipe: IslandsRecipe, condition: Condition
) -> None:
    """Write some images' classes, or their captions as experts read them."""
    num_images = len(conditions)
    if isinstance(condition, TextCondition):
        captions = [str(caption) for caption in conditions]
        embeddings = _encode_captions(captions, recipe, condition)
        write_rows(path, (num_images, condition.max_tokens, condition.dim), embeddings)
    else:
        write_rows(path, (num_images,), [conditions], np.int64)


def _encode_captions(
    captions: list[str], recipe: IslandsRecipe, condition: TextCondition
) -> Iterator[np.ndarray]:
    """Yield captions as the encoder that the recipe names sees them."""
    # Importing the encoder takes seconds, and most recipes do without.
    from ddm.encoders.text import BLOCK, TextEncoder

    if not isinstance(recipe.condition, TextRecipe):
        return
    encoder = TextEncoder.open(Path(recipe.condition.encoder), condition)
    for first in range(0, len(captions), BLOCK):
        yield encoder.encode(captions[first : first + BLOCK]).numpy()


def _write_router_inputs(islands: Islands, data: DividedData) -> None:
    """Write what the router is made from: labelled images to fit and to judge it on, and exact counts."""
    recipe = data.recipe
    # The same call with the same seed as in `fit_public_parts`, which thus divided these images in the same way.
    fitted, holdout = divide(len(data.fitted_rows), recipe.public)
    images = data.parts.images
    fitted_images, holdout_images = images.latents or (images.fitted, images.holdout)
    _write_labelled(islands.router, "fitted", fitted_images, data.fitted_rows[fitted], data)
    _write_labelled(islands.router, "holdout", holdout_images, data.fitted_rows[holdout], data)

    if isinstance(recipe.router, SamplesSettings) and recipe.router.conditional:
        conditions = _read_conditions(data.dataset, data.parts.condition)
        if conditions is not None:
            fitted_conditions = conditions[data.fitted_rows[fitted].numpy()]
            path = islands.router / "fitted-conditions.npy"
            _write_conditions(path, fitted_conditions, recipe, data.parts.condition)
    save_tensors(islands.router / "counts.safetensors", _exact_counts(data))


def _write_labelled(
    folder: Path, name: str, images: Tensor, rows: Tensor, data: DividedData
) -> None:
    """Write some images, with the island and the group of each."""
    write_rows(folder / f"{name}.npy", tuple(images.shape), [images.numpy()])
    for label, label_N in (("islands", data.division.island_N), ("groups", data.group_N)):
        labels = label_N[rows].numpy()
        write_rows(folder / f"{name}-{label}.npy", (len(rows),), [labels], np.int64)


def _exact_counts(data: DividedData) -> dict[str, Tensor]:
    """Count images by island and group, shape (K, G), and by island, class and group, shape (K, C, G)."""
    num_islands = data.division.num_islands
    num_groups = data.recipe.num_groups
    island_N = data.division.island_N
    # Island and group as one number, so that one `bincount` counts all pairs.
    cell_N = island_N * num_groups + data.group_N
    counts = torch.bincount(cell_N, minlength=num_islands * num_groups)
    tensors = {"counts": counts.view(num_islands, num_groups)}

    condition = data.parts.condition
    if isinstance(condition, ClassCondition):
        num_classes = condition.num_classes
        class_N = torch.from_numpy(data.dataset.classes(condition.classes))
        # As above, in the order of the tensor's axes: island, class, group.
        cell_N = (island_N * num_classes + class_N) * num_groups + data.group_N
        class_counts = torch.bincount(cell_N, minlength=num_islands * num_classes * num_groups)
        tensors["class_counts"] = class_counts.view(num_islands, num_classes, num_groups)
    return tensors


def _split_record(data: DividedData, plan: Plan) -> Split:
    training_from_seed = None
    if data.budget is not None:
        training_from_seed = data.budget.island
    division = data.division
    owner = data.recipe.owner
    sizes = division.size_K
    values: Sequence[str | None] = division.values or [None] * len(sizes)
    islands = [
        SplitIsland(island_id=name, num_images=size, value=value)
        for name, size, value in zip(plan.silos, sizes, values, strict=True)
    ]
    return Split(
        plan_id=plan.plan_id,
        plan_digest=plan.digest,
        created_at=plan.created_at,
        by=_division_name(division),
        column=division.column,
        seed=data.recipe.public.seed,
        name=owner.name,
        data=data.dataset.path.name,
        cite=owner.cite,
        training_from_seed=training_from_seed,
        islands=tuple(islands),
        software=software_versions(),
    )


def _division_name(division: Division) -> Literal["clusters", "random", "column"]:
    if division.by == "clusters":
        return "clusters"
    if division.by == "random":
        return "random"
    return "column"
