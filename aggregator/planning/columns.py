"""The columns of public images that a samples router learns from: classes, silos and captions, checked and kept."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aggregator.intake.public_columns import CAPTIONS, CLASSES, SILOS, TEXTS, Columns
from aggregator.planning.recipe import Recipe
from ddm.errors import DataError, SetupError
from ddm.images.columns import class_numbers
from ddm.images.samples import ImageSet
from ddm.planning.recipe import TextRecipe
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.protocol.routers import SamplesRouter


def names_needed(recipe: Recipe) -> dict[str, str]:
    """Return which columns the recipe's router learns from: what they are, and what the file calls them."""
    router = recipe.router
    if not isinstance(router, SamplesRouter):
        return {}
    found = {SILOS: recipe.public.silo_column} if router.labels == "silo" else {}
    if router.labels == "class" or (
        router.conditional and isinstance(recipe.condition, ClassCondition)
    ):
        found[CLASSES] = "labels"
    if router.conditional and isinstance(recipe.condition, TextRecipe):
        found[CAPTIONS] = "captions"
    if router.labels == "experts":
        found.pop(CLASSES, None)  # each expert is told classes that its silo has
    return found


def read_columns(images: ImageSet, recipe: Recipe) -> Columns:
    """Read the columns that the recipe's router learns from, one value for every public image.

    Raises:
        DataError, MissingFileError: there is no such column, or it does not hold what the recipe needs.
    """
    found: dict[str, NDArray[np.generic]] = {}
    for kind, name in names_needed(recipe).items():
        column = images.column(name)
        if (
            kind == CLASSES
            and column.dtype.kind in "US"
            and isinstance(recipe.condition, ClassCondition)
        ):
            # A table holds classes as text, by number or by name, as a silo's does.
            column = class_numbers(column, recipe.condition.classes, f"column {name}")
        found[kind] = column
        wanted = "whole numbers" if kind == CLASSES else "text"
        if column.shape != (len(images),) or column.dtype.kind not in (
            "iu" if kind == CLASSES else "U"
        ):
            expected = f"{wanted}, one for each of {len(images)} public images"
            raise DataError(
                f"column {name}", expected=expected, got=f"{column.dtype} of shape {column.shape}"
            )
    return found


def fitted_columns(
    columns: Columns, rows: Tensor, recipe: Recipe, condition: Condition, silos: Collection[str]
) -> Columns:
    """Return the columns of the images that the plan is fitted on, checked against the plan.

    Args:
        columns: of all public images.
        rows: the images that the plan is fitted on.
        recipe: the operator's.
        condition: the experts'.
        silos: the silos of the plan.

    Raises:
        DataError: a class that the plan does not have, or a silo of which no image is.
    """
    found = {kind: column[rows.numpy()] for kind, column in columns.items()}
    if (missing := names_needed(recipe).keys() - found.keys()) and len(rows):
        expected = (
            f"the columns {', '.join(sorted(names_needed(recipe)[kind] for kind in missing))}"
        )
        raise DataError("public images", expected=expected, got="images without them")
    if CLASSES in found:
        counted = recipe.statistics.class_counts
        num = (
            condition.num_classes
            if isinstance(condition, ClassCondition)
            else counted.num_classes
            if counted
            else 0
        )
        low, high = int(found[CLASSES].min()), int(found[CLASSES].max())
        if low < 0 or high >= num:
            raise DataError(
                "column labels", expected=f"classes 0 to {num - 1}", got=f"{low} to {high}"
            )
    if SILOS in found:
        named = set(found[SILOS].tolist())
        if without := sorted(set(silos) - named):
            raise DataError(
                f"column {recipe.public.silo_column}",
                expected="public images of every silo of the plan, by its id; those of nobody may say anything else",
                got=f"none of {', '.join(without)[:200]}",
                remedy='Add some, or use router.labels "class", "group" or "experts".',
            )
    if (
        CAPTIONS in found
        and isinstance(recipe.condition, TextRecipe)
        and isinstance(condition, TextCondition)
    ):
        from ddm.encoders.text import TextEncoder  # takes seconds, and most recipes do without

        texts, number_N = np.unique(found[CAPTIONS], return_inverse=True)
        encoder = TextEncoder.open(Path(recipe.condition.encoder), condition)
        found |= {
            CAPTIONS: number_N.astype(np.int64),
            TEXTS: encoder.encode([str(text) for text in texts]).numpy(),
        }
    return found


def check_carried(found: Columns, recipe: Recipe) -> None:
    """Refuse a recipe with --carry whose router learns from columns that the plan in force does not keep.

    Raises:
        SetupError: the recipe's router needs others.
    """
    needed = names_needed(recipe)
    if missing := sorted(needed[kind] for kind in needed.keys() - found.keys()):
        raise SetupError(
            "recipe, router",
            expected="a router that learns from what the plan in force kept of its public images",
            got=f"one that needs {', '.join(missing)}",
            remedy='Use router.labels "experts" or "group", or sign a plan without --carry.',
        )
