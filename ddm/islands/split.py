"""Divides one owner's data set into islands, each a folder that can be trained by itself, and signs the plan of all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.encoders import Progress
from ddm.errors import BusyError, DataError, SetupError
from ddm.io.files import move_into_place, staging_folder, write_atomic
from ddm.io.modes import private_folder
from ddm.io.space import require_free_space
from ddm.io.tensors import save_tensors
from ddm.islands.arrays import write_rows
from ddm.islands.data import Dataset
from ddm.islands.folder import SPLIT_NAME, Islands, Split, SplitIsland
from ddm.islands.keys import found, make_keys
from ddm.islands.recipe import IslandsRecipe
from ddm.models import network_size
from ddm.planning.document import plan_of
from ddm.planning.fit import PublicParts, divide, fit_public_parts
from ddm.planning.recipe import TextRecipe
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.protocol.enrolment import Agreed
from ddm.protocol.limits import Audit, Limits
from ddm.protocol.partition import SiloPartition
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesRouter
from ddm.protocol.statistics import EXACT, Budget, ClassCountsStatistic, CountsStatistic, Statistics

# Shape legend: N images, K islands, G groups of fine centroids.

_LIFE = timedelta(days=5 * 365)
_BLOCK = 4096
_HEADER_BYTES = 1 << 20
NO_LIMIT_S, NO_LIMIT_HOURS = 10**10, 1e7


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
        return None if self.by in ("clusters", "random") else self.by


def split(
    dataset: Dataset,
    recipe: IslandsRecipe,
    num_islands: int | None,
    by: str,
    out: Path,
    passphrase: bytes,
    on_progress: Progress | None = None,
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
        SetupError: fewer than two islands, or another number than the column has values.
        DataError: an island with too few images, an image without a value in the column, or images, labels or captions
            that do not fit the recipe.
        DiskError: too little room.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        remedy = "Choose another folder; one that was split is never overwritten."
        raise BusyError(
            str(out),
            expected="a path where nothing exists",
            got="a folder or a file",
            remedy=remedy,
        )
    if by not in ("clusters", "random"):
        present = dataset.values(by).require_complete(f"column {by}")
        values = sorted(set(present), key=_value_order)
        place_of = {value: place for place, value in enumerate(values)}
        number_N = np.array([place_of[value] for value in present])
        _check_number(len(values), num_islands, f"column {by}")
        num_islands = len(values)
    recipe = _with_islands(recipe, num_islands, by)
    with staging_folder(out.absolute()) as part:
        islands = Islands(part)
        private_folder(part)
        chosen = _chosen(len(dataset.images), recipe)
        fitted = fit_public_parts(recipe, dataset.images[chosen], islands.bundle, on_progress)
        fine_N = _fine(dataset.images, fitted, on_progress)
        if by == "clusters":
            division = Division(by, fitted.clusters.coarse_F[fine_N])
        elif by == "random":
            generator = torch.Generator().manual_seed(recipe.public.seed)
            order_N = torch.randperm(len(dataset.images), generator=generator)
            division = Division(by, order_N % (num_islands or recipe.clustering.num_coarse))
        else:
            division = Division(by, torch.from_numpy(number_N.astype(np.int64)), tuple(values))
        size_K = _sizes(division, recipe)
        public = make_keys(islands, passphrase)
        plan = _plan(recipe, fitted, size_K, str(public), islands.bundle)
        write_atomic(islands.bundle / "plan.json", plan.encode())
        _write_islands(islands, plan, recipe, dataset, division, fitted, on_progress)
        _write_router(islands, dataset, division, fitted, fine_N, chosen, recipe)
        found(islands, plan, recipe.owner.name, passphrase)
        record = _record(recipe, plan, division, size_K, dataset)
        write_atomic(part / SPLIT_NAME, record.encode())
        if out.exists():
            out.rmdir()
        move_into_place(part, out)
    return record


def _value_order(value: str) -> tuple[bool, float, str]:
    """Return what sorts numbers by their size, before texts."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


def _check_number(found_values: int, wanted: int | None, subject: str) -> None:
    if not 2 <= found_values <= 1024 or wanted not in (None, found_values):
        expected = (
            "2 to 1024 values" if wanted is None else f"{wanted} values, as many as --islands"
        )
        raise SetupError(subject, expected=expected, got=f"{found_values}")


def _with_islands(recipe: IslandsRecipe, num: int | None, by: str) -> IslandsRecipe:
    """Return the recipe with as many coarse clusters as islands, where these are the clusters."""
    wanted = num or recipe.clustering.num_coarse
    if not 2 <= wanted <= 1024:
        raise SetupError("--islands", expected="2 to 1024", got=str(wanted))
    if by != "clusters":
        return recipe
    return recipe.model_copy(
        update={"clustering": recipe.clustering.model_copy(update={"num_coarse": wanted})}
    )


def _chosen(num: int, recipe: IslandsRecipe) -> Tensor:
    """Return the images that encoder, clusters, sketch and router are fitted on, ascending."""
    if num <= recipe.owner.fit_images:
        return torch.arange(num)
    order_N = torch.randperm(num, generator=torch.Generator().manual_seed(recipe.public.seed))
    return order_N[: recipe.owner.fit_images].sort().values


def _fine(images: Tensor, fitted: PublicParts, on_progress: Progress | None) -> Tensor:
    """Return the fine centroid of each image."""
    found: list[Tensor] = []
    for first in range(0, len(images), _BLOCK):
        found.append(fitted.clusters.assign(fitted.network.encode(images[first : first + _BLOCK])))
        if on_progress:
            on_progress(min(first + _BLOCK, len(images)), len(images))
    return torch.cat(found)


def _sizes(division: Division, recipe: IslandsRecipe) -> list[int]:
    """Return the number of images of each island.

    Raises:
        DataError: one has too few.
    """
    size_K = torch.bincount(division.island_N, minlength=int(division.island_N.max()) + 1).tolist()
    fewest = max(2, recipe.partition.min_images)
    if small := {k: size for k, size in enumerate(size_K) if size < fewest}:
        number, size = min(small.items(), key=lambda item: item[1])
        raise DataError(
            f"island {number}",
            expected=f"at least {fewest} images (partition.min_images)",
            got=f"{size}" + (f"; {len(small)} islands have too few" if len(small) > 1 else ""),
            remedy="Ask for fewer islands, set clustering.balanced = true, or lower partition.min_images.",
        )
    return [int(size) for size in size_K]


def island_names(num: int) -> list[str]:
    """Return the islands' names, whose order is that of their numbers."""
    return [f"island{number:0{len(str(num - 1))}d}" for number in range(num)]


def _plan(
    recipe: IslandsRecipe,
    fitted: PublicParts,
    size_K: Sequence[int],
    receipt_key: str,
    folder: Path,
) -> Plan:
    """Write the plan of one owner: exact counts that nobody is shown, no budget, no audit, no limit on time."""
    names, condition, shape = (
        island_names(len(size_K)),
        fitted.condition,
        fitted.latent.shape(recipe.data.shape),
    )
    num_classes = condition.num_classes if isinstance(condition, ClassCondition) else None
    expert_bytes = network_size(recipe.expert.architecture, shape, condition).bytes + _HEADER_BYTES
    return plan_of(
        recipe,
        fitted,
        folder,
        name=recipe.owner.name,
        valid_for=_LIFE,
        silos=tuple(names),
        agreed={name: Agreed(images=size) for name, size in zip(names, size_K, strict=True)},
        receipt_key=receipt_key,
        partition=SiloPartition(min_images=recipe.partition.min_images),
        statistics=Statistics(
            unit="image",
            relation="none",
            total=Budget(epsilon=EXACT, delta=0.0),
            counts=CountsStatistic(epsilon=EXACT, num_groups=recipe.num_groups),
            class_counts=ClassCountsStatistic(epsilon=EXACT, num_classes=num_classes)
            if num_classes
            else None,
        ),
        audit=Audit(required=False, min_holdout_units=1, max_near_copy_rate=1.0, max_mia_auc=1.0),
        limits=Limits(
            expert_bytes=expert_bytes,
            statistic_bytes=1,
            train_s=NO_LIMIT_S,
            gpu_hours=NO_LIMIT_HOURS,
        ),
    )


def _write_islands(
    islands: Islands,
    plan: Plan,
    recipe: IslandsRecipe,
    dataset: Dataset,
    division: Division,
    fitted: PublicParts,
    on_progress: Progress | None,
) -> None:
    """Write each island's images as its expert sees them, and their conditions."""
    num, shape = len(dataset.images), plan.expert_shape
    text_values = (
        plan.condition.max_tokens * plan.condition.dim
        if isinstance(plan.condition, TextCondition)
        else 0
    )
    require_free_space(
        {islands.path: 4 * num * (int(np.prod(shape)) + text_values)}, "the islands' images"
    )
    done, told = 0, _told(dataset, plan.condition)
    for number in range(len(plan.silos)):
        folder, rows = islands.island(number), torch.nonzero(division.island_N == number)[:, 0]

        def seen(rows: Tensor = rows) -> Iterator[np.ndarray]:
            nonlocal done
            for some in torch.split(rows, _BLOCK):
                yield fitted.autoencoder.encode(dataset.images[some]).numpy()
                done += len(some)
                if on_progress:
                    on_progress(done, num)

        write_rows(folder.rows, (len(rows),), [rows.numpy()], np.int64)
        write_rows(folder.images, (len(rows), *shape), seen())
        if told is not None:
            _write_conditions(folder.labels, told[rows.numpy()], recipe, plan.condition)


def _told(dataset: Dataset, condition: Condition) -> np.ndarray | None:
    """Return the class or the caption of every image; None where experts are told nothing."""
    if isinstance(condition, ClassCondition):
        return dataset.classes(condition.classes)
    return np.array(dataset.captions()) if isinstance(condition, TextCondition) else None


def _write_conditions(
    path: Path, told: np.ndarray, recipe: IslandsRecipe, condition: Condition
) -> None:
    """Write some images' classes, or their captions as experts read them."""
    if isinstance(condition, TextCondition):
        texts = _texts([str(caption) for caption in told], recipe, condition)
        write_rows(path, (len(told), condition.max_tokens, condition.dim), texts)
    else:
        write_rows(path, (len(told),), [told], np.int64)


def _texts(
    captions: list[str], recipe: IslandsRecipe, condition: TextCondition
) -> Iterator[np.ndarray]:
    """Yield captions as the encoder that the recipe names sees them."""
    from ddm.encoders.text import BLOCK, TextEncoder  # takes seconds, and most recipes do without

    if not isinstance(recipe.condition, TextRecipe):
        return
    encoder = TextEncoder.open(Path(recipe.condition.encoder), condition)
    for first in range(0, len(captions), BLOCK):
        yield encoder.encode(captions[first : first + BLOCK]).numpy()


def _write_router(
    islands: Islands,
    dataset: Dataset,
    division: Division,
    fitted: PublicParts,
    fine_N: Tensor,
    chosen: Tensor,
    recipe: IslandsRecipe,
) -> None:
    """Write what the router is made from: labelled images to fit and to judge it on, and exact counts."""
    group_N, island_N = fitted.clusters.group_F[fine_N], division.island_N
    num_islands, num_groups = int(island_N.max()) + 1, recipe.num_groups
    images = fitted.images
    seen = images.latents or (images.fitted, images.holdout)
    if isinstance(recipe.router, SamplesRouter) and recipe.router.conditional:
        told = _told(dataset, fitted.condition)
        if told is not None:
            own = told[chosen[divide(len(chosen), recipe.public)[0]].numpy()]
            _write_conditions(
                islands.router / "fitted-conditions.npy", own, recipe, fitted.condition
            )
    for name, part, rows in zip(
        ("fitted", "holdout"), seen, divide(len(chosen), recipe.public), strict=True
    ):
        own = chosen[rows]
        write_rows(islands.router / f"{name}.npy", tuple(part.shape), [part.numpy()])
        write_rows(
            islands.router / f"{name}-islands.npy", (len(own),), [island_N[own].numpy()], np.int64
        )
        write_rows(
            islands.router / f"{name}-groups.npy", (len(own),), [group_N[own].numpy()], np.int64
        )
    counts = torch.bincount(island_N * num_groups + group_N, minlength=num_islands * num_groups)
    tensors = {"counts": counts.view(num_islands, num_groups)}
    if isinstance(fitted.condition, ClassCondition):
        num_classes = fitted.condition.num_classes
        cell_N = (
            island_N * num_classes + torch.from_numpy(dataset.classes(fitted.condition.classes))
        ) * num_groups + group_N
        by_class = torch.bincount(cell_N, minlength=num_islands * num_classes * num_groups)
        tensors["class_counts"] = by_class.view(num_islands, num_classes, num_groups)
    save_tensors(islands.router / "counts.safetensors", tensors)


def _record(
    recipe: IslandsRecipe, plan: Plan, division: Division, size_K: Sequence[int], dataset: Dataset
) -> Split:
    values: Sequence[str | None] = division.values or [None] * len(size_K)
    return Split(
        plan_id=plan.plan_id,
        plan_digest=plan.digest,
        created_at=plan.created_at,
        by="column" if division.column else "clusters" if division.by == "clusters" else "random",
        column=division.column,
        seed=recipe.public.seed,
        name=recipe.owner.name,
        data=dataset.path.name,
        licence=recipe.owner.licence,
        cite=recipe.owner.cite,
        islands=tuple(
            SplitIsland(island_id=name, num_images=size, value=value)
            for name, size, value in zip(plan.silos, size_K, values, strict=True)
        ),
        software={name: version(name) for name in ("archipelago", "torch")},
    )
