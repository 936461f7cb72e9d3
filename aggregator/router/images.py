"""The images that a samples router is trained on: labelled public ones, or those that the accepted experts draw."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.examination import public_images
from aggregator.intake.inventory import Inventory
from aggregator.intake.public_columns import CAPTIONS, CLASSES, SILOS, TEXTS, kept_columns
from ddm.diffusion.path import Experts, path_named
from ddm.errors import SetupError
from ddm.partition.layout import Layout
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.protocol.routers import SamplesRouter
from ddm.routers.base import Progress
from ddm.routers.conditional import expected_class_counts
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import (
    Labelled,
    class_shares,
    classes_of_experts,
    numbered,
    silo_shares,
    texts_of_experts,
)
from ddm.routers.samples import draw_from_experts

# Shape legend: N images, K silos, E experts, C classes, G public groups, J cells.


def training_images(
    federation: Federation,
    inventory: Inventory,
    settings: SamplesRouter,
    counts: CountsRouter,
    experts: Callable[[], Experts],
    seed: int,
    on_progress: Progress | None,
    device: torch.device,
) -> Labelled:
    """Return the images that the plan's router is trained on, with the probability of every expert.

    Args:
        federation: the operator's folder.
        inventory: what was accepted.
        settings: the router's recipe.
        counts: the router of the silos' counts, for their shares of the groups.
        experts: returns the accepted experts; called only where they draw the images.
        seed: of what experts are told, and of their noise.
        on_progress: see `draw_from_experts`.
        device: where the experts compute.

    Raises:
        SetupError: the plan's public images have no such labels.
        DataError: no image resembles those of some expert.
        NumericalError: an expert draws images that are not finite.
    """
    plan, layout = inventory.plan, inventory.layout()
    if settings.labels == "experts":
        num, told = settings.images_per_expert, _told(federation, inventory, settings, layout, seed)
        path = path_named(plan.objective.ensemble_path)
        drawn_EN = draw_from_experts(
            experts(),
            plan.expert_shape,
            num,
            seed,
            path,
            on_progress,
            device=device,
            condition_EN=told,
        )
        return Labelled.drawn(drawn_EN, told)
    images = public_images(federation, plan.plan_id, "fitted")
    seen = public_images(federation, plan.plan_id, "fitted", as_latents=False)
    group_N, num_groups = (
        inventory.files.clusters.groups(inventory.files.encoder.encode(seen)),
        counts.sketch.num_groups,
    )
    condition_N = _conditions(federation, inventory) if settings.conditional else None
    if settings.labels == "group":
        share_EG, _ = layout.split(counts.log_mass_KG.exp())
        return Labelled.of_cells(images, group_N, share_EG, condition_N)
    if settings.labels == "class":
        class_N = torch.from_numpy(_column(federation, inventory, CLASSES))
        return Labelled.of_cells(
            images, class_N * num_groups + group_N, _class_shares(inventory, layout), condition_N
        )
    silo_N = numbered(_column(federation, inventory, SILOS).tolist(), list(inventory.silos))
    known = silo_N >= 0
    own_N, group_N = silo_N[known], group_N[known]
    share_EJ = silo_shares(own_N, group_N, num_groups, layout)
    told_N = None if condition_N is None else condition_N[known]
    return Labelled.of_cells(images[known], own_N * num_groups + group_N, share_EJ, told_N)


def _class_shares(inventory: Inventory, layout: Layout) -> Tensor:
    """Return each expert's shares of classes and groups, (E, C G), as the released class counts tell them."""
    terms = inventory.plan.statistics.class_counts
    if terms is None:
        raise SetupError(
            "router.labels", expected="a plan with class counts", got="a plan without them"
        )
    noisy_KCG, units = (
        torch.stack(list(inventory.class_counts().values())),
        list(inventory.num_units.values()),
    )
    count_KCG, _ = expected_class_counts(inventory.files.sketch, noisy_KCG, units, terms.epsilon)
    return class_shares(count_KCG, layout)


def _told(
    federation: Federation, inventory: Inventory, settings: SamplesRouter, layout: Layout, seed: int
) -> Tensor | None:
    """Return what each expert is told of each image that it draws; None for a router that reads no condition.

    Classes come by the silo's class counts, or all equally often where the plan has none; texts are public captions.
    """
    plan, num, num_experts = inventory.plan, settings.images_per_expert, len(layout.parts)
    generator = torch.Generator().manual_seed(seed)
    match settings.told(plan.condition):
        case ClassCondition(num_classes=num_classes):
            if plan.statistics.class_counts is None:
                return torch.randint(num_classes, (num_experts, num), generator=generator)
            return classes_of_experts(_class_shares(inventory, layout), num_classes, num, generator)
        case TextCondition():
            return texts_of_experts(_conditions(federation, inventory), num_experts, num, generator)
    return None


def _conditions(federation: Federation, inventory: Inventory) -> Tensor:
    """Return the class (N,) or the text (N, L, D) of each public image."""
    if isinstance(inventory.plan.condition, ClassCondition):
        return torch.from_numpy(_column(federation, inventory, CLASSES))
    number_N, texts = (_column(federation, inventory, name) for name in (CAPTIONS, TEXTS))
    return torch.from_numpy(texts[number_N])


def _column(federation: Federation, inventory: Inventory, name: str) -> np.ndarray:
    found = kept_columns(federation, inventory.plan.plan_id).get(name)
    if found is None:
        got = f"a plan without {name.removeprefix('fitted_')}"
        expected = "public images with what the plan's router learns from"
        raise SetupError(
            "public images",
            expected=expected,
            got=got,
            remedy="Make the plan again: aggregator plan.",
        )
    return found.astype(np.int64) if found.dtype.kind in "iu" else np.asarray(found)
