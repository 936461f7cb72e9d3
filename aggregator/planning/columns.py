"""The columns of public images that a samples router learns from: classes, silos and captions, checked and kept."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aggregator.intake.public_columns import CAPTIONS, CLASSES, SILOS, TEXTS, PublicColumns
from aggregator.planning.recipe import Recipe
from ddm.errors import DataError, SetupError
from ddm.images.columns import class_numbers
from ddm.images.samples import ImageSet
from ddm.planning.recipe import TextRecipe
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.protocol.routers import SamplesSettings


def names_needed(recipe: Recipe) -> dict[str, str]:
    """Return which columns the recipe's router learns from: what they are, and what the file calls them."""
    router = recipe.router
    if not isinstance(router, SamplesSettings):
        return {}
    names = {}
    if router.labels == "silo":
        names[SILOS] = recipe.public.silo_column
    # A router on images of the experts needs no classes: each expert is given classes that its silo has.
    reads_class = router.conditional and isinstance(recipe.condition, ClassCondition)
    if router.labels == "class" or (reads_class and router.labels != "experts"):
        names[CLASSES] = "labels"
    if router.conditional and isinstance(recipe.condition, TextRecipe):
        names[CAPTIONS] = "captions"
    return names


def read_columns(images: ImageSet, recipe: Recipe) -> PublicColumns:
    """Read the columns that the recipe's router learns from, one value for every public image.

    Raises:
        DataError, MissingFileError: there is no such column, or it does not hold what the recipe needs.
    """
    columns: dict[str, NDArray[np.generic]] = {}
    for kind, name in names_needed(recipe).items():
        column = images.column(name)
        is_text = column.dtype.kind in "US"
        if kind == CLASSES and is_text and isinstance(recipe.condition, ClassCondition):
            # A table holds classes as text, by number or by name, as a silo's does.
            column = class_numbers(column, recipe.condition.classes, f"column {name}")
        _check_column(column, kind, name, len(images))
        columns[kind] = column
    return columns


def _check_column(column: NDArray[Any], kind: str, name: str, num_images: int) -> None:
    """Refuse a column of another type, or without one value for each image."""
    if kind == CLASSES:
        values = "whole numbers"
        # NumPy's kinds of whole numbers, with a sign and without.
        dtype_kinds = "iu"
    else:
        values = "text"
        dtype_kinds = "U"
    if column.shape != (num_images,) or column.dtype.kind not in dtype_kinds:
        raise DataError(
            f"column {name}",
            expected=f"{values}, one for each of {num_images} public images",
            got=f"{column.dtype} of shape {column.shape}",
            remedy="Give the images a column of this kind, with one entry for each of them, in their order.",
        )


def fitted_columns(
    columns: PublicColumns,
    rows: Tensor,
    recipe: Recipe,
    condition: Condition,
    silos: Collection[str],
) -> PublicColumns:
    """Return the columns of the images that the plan is fitted on, checked against the plan.

    Args:
        columns: the columns of all public images.
        rows: the images that the plan is fitted on.
        recipe: the operator's.
        condition: the experts'.
        silos: the silos that train for the plan.

    Raises:
        DataError: a class that the plan does not have, or a silo of which no image is.
    """
    fitted = {kind: column[rows.numpy()] for kind, column in columns.items()}
    needed = names_needed(recipe)
    missing = [name for kind, name in needed.items() if kind not in fitted]
    if missing and len(rows):
        raise DataError(
            "public images",
            expected=f"the columns {', '.join(sorted(missing))}",
            got="images without them",
            remedy=(
                "Give the public images these columns, one entry for each image, or use other "
                "router.labels in the recipe."
            ),
        )
    if CLASSES in fitted:
        _check_classes(fitted[CLASSES], _num_classes(recipe, condition))
    if SILOS in fitted:
        # A silo without images would have no class in the router's training.
        _check_every_silo(fitted[SILOS], recipe.public.silo_column, silos)
    if CAPTIONS in fitted and isinstance(condition, TextCondition):
        fitted |= _encode_captions(fitted[CAPTIONS], recipe, condition)
    return fitted


def _num_classes(recipe: Recipe, condition: Condition) -> int:
    """Return how many classes the plan has: its condition's, else those that it counts."""
    if isinstance(condition, ClassCondition):
        return condition.num_classes
    class_counts = recipe.statistics.class_counts
    return class_counts.num_classes if class_counts else 0


def _check_classes(classes: NDArray[Any], num_classes: int) -> None:
    lowest = int(classes.min())
    highest = int(classes.max())
    if lowest < 0 or highest >= num_classes:
        raise DataError(
            "column labels",
            expected=f"classes 0 to {num_classes - 1}",
            got=f"{lowest} to {highest}",
            remedy="Number the classes of the public images from 0 to condition.num_classes - 1 of the recipe.",
        )


def _check_every_silo(column: NDArray[Any], column_name: str, silos: Collection[str]) -> None:
    silos_without_images = sorted(set(silos) - set(column.tolist()))
    if silos_without_images:
        raise DataError(
            f"column {column_name}",
            expected="public images of every silo of the plan, named by its id; other images may have any other text",
            got=f"none of {', '.join(silos_without_images)[:200]}",
            remedy='Add public images of these silos, or use router.labels "class", "group" or "experts".',
        )


def _encode_captions(
    captions: NDArray[Any], recipe: Recipe, condition: TextCondition
) -> dict[str, NDArray[np.generic]]:
    """Return each distinct caption as its encoder sees it, and which of them each image has."""
    from ddm.encoders.text import TextEncoder  # takes seconds, and most recipes do without

    if not isinstance(recipe.condition, TextRecipe):
        return {}
    # Public images often share captions; each distinct one is encoded once.
    texts, number_N = np.unique(captions, return_inverse=True)
    encoder = TextEncoder.open(Path(recipe.condition.encoder), condition)
    vectors = encoder.encode([str(text) for text in texts])
    return {CAPTIONS: number_N.astype(np.int64), TEXTS: vectors.numpy()}


def check_columns_kept(columns: PublicColumns, recipe: Recipe) -> None:
    """Refuse a recipe with --carry whose router learns from columns that the plan in force does not keep.

    Raises:
        SetupError: the recipe's router needs others.
    """
    missing = [name for kind, name in names_needed(recipe).items() if kind not in columns]
    if missing:
        raise SetupError(
            "recipe, router",
            expected="a router that learns from what the plan in force kept of its public images",
            got=f"one that needs {', '.join(sorted(missing))}",
            remedy='Use router.labels "experts" or "group", or sign a plan without --carry.',
        )
