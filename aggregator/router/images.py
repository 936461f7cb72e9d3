"""The images that a samples router is trained on: labelled public ones, or those that the accepted experts draw."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.examination import public_images
from aggregator.intake.inventory import Inventory
from aggregator.intake.public_columns import CAPTIONS, CLASSES, SILOS, TEXTS, kept_columns
from aggregator.router.statistics import AcceptedStatistics
from ddm.diffusion.path import Expert, path_named
from ddm.errors import SetupError
from ddm.loading.ensemble import on_path
from ddm.models import load_expert
from ddm.partition.layout import Layout
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.protocol.routers import SamplesSettings
from ddm.routers.base import LossCallback
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
from ddm.sampling.expert_cache import LazyExperts

# Shape legend: N images, K silos, E experts, C classes, G public groups, J cells.


@dataclass(frozen=True)
class RouterImages:
    """What an aggregator can label images from.

    Attributes:
        federation: the operator's folder.
        inventory: what was accepted.
        statistics: what the accepted silos drew.
        counts: the router of the silos' counts, for their shares of the groups.
        seed: the seed of the conditions that experts draw under, and of their noise.
        on_progress: see `draw_from_experts`.
        device: where the experts compute.
    """

    federation: Federation
    inventory: Inventory
    statistics: AcceptedStatistics
    counts: CountsRouter
    seed: int
    on_progress: LossCallback | None
    device: torch.device

    def labelled(self, settings: SamplesSettings) -> Labelled:
        """Return the images that a samples router is trained on, with the probability of every expert.

        Raises:
            SetupError: the plan's public images have no such labels.
            DataError: no image resembles those of some expert.
            NumericalError: an expert draws images that are not finite.
        """
        if settings.labels == "experts":
            return self._drawn_by_experts(settings)
        images = public_images(self.federation, self._plan_id, "fitted")
        # With a group the cells tell the experts of one silo apart, which share its classes.
        group_N = self._public_groups()
        condition_N = None
        if settings.conditional:
            condition_N = self._public_conditions()
        layout = self.statistics.layout
        num_groups = self.counts.sketch.num_groups
        if settings.labels == "group":
            share_EG, _ = layout.split(self.counts.log_mass_KG.exp())
            return Labelled.of_cells(images, group_N, share_EG, condition_N)
        if settings.labels == "class":
            class_N = torch.from_numpy(self._column(CLASSES))
            # Cells are numbered as `class_shares` orders its columns.
            cell_N = class_N * num_groups + group_N
            return Labelled.of_cells(images, cell_N, self._class_shares(layout), condition_N)
        return self._labelled_by_silo(images, group_N, condition_N, layout)

    def _labelled_by_silo(
        self, images: Tensor, group_N: Tensor, condition_N: Tensor | None, layout: Layout
    ) -> Labelled:
        """Label the public images that are said to be of an accepted silo."""
        num_groups = self.counts.sketch.num_groups
        silo_N = numbered(self._column(SILOS).tolist(), list(self.inventory.silos))
        # Images may be said to be of silos that sent nothing or were refused. They belong to no expert of the release.
        is_known_N = silo_N >= 0
        silo_N = silo_N[is_known_N]
        group_N = group_N[is_known_N]
        if condition_N is not None:
            condition_N = condition_N[is_known_N]
        share_EJ = silo_shares(silo_N, group_N, num_groups, layout)
        # Cells are numbered as `silo_shares` orders its columns.
        cell_N = silo_N * num_groups + group_N
        return Labelled.of_cells(images[is_known_N], cell_N, share_EJ, condition_N)

    def _drawn_by_experts(self, settings: SamplesSettings) -> Labelled:
        plan = self.inventory.plan
        condition_EN = self._conditions_of_experts(settings)
        drawn_EN = draw_from_experts(
            accepted_experts(self.inventory, self.device),
            plan.expert_shape,
            settings.images_per_expert,
            self.seed,
            path_named(plan.objective.ensemble_path),
            self.on_progress,
            device=self.device,
            condition_EN=condition_EN,
        )
        return Labelled.drawn(drawn_EN, condition_EN)

    def _conditions_of_experts(self, settings: SamplesSettings) -> Tensor | None:
        """Return the conditions under which each expert draws; None for a router that reads no condition.

        Classes come by the class counts, or all equally often where the plan has none; texts are public captions.
        """
        plan = self.inventory.plan
        layout = self.statistics.layout
        num_images = settings.images_per_expert
        num_experts = len(layout.parts)
        # The same seed gives the same conditions, so that a router can be trained again and compared.
        generator = torch.Generator().manual_seed(self.seed)
        match settings.router_condition(plan.condition):
            case ClassCondition(num_classes=num_classes):
                if plan.statistics.class_counts is None:
                    shape = (num_experts, num_images)
                    return torch.randint(num_classes, shape, generator=generator)
                shares = self._class_shares(layout)
                return classes_of_experts(shares, num_classes, num_images, generator)
            case TextCondition():
                texts_NLD = self._public_conditions()
                return texts_of_experts(texts_NLD, num_experts, num_images, generator)
        return None

    def _class_shares(self, layout: Layout) -> Tensor:
        """Return each expert's shares of classes and groups, (E, C G), as the class counts state them."""
        terms = self.inventory.plan.statistics.class_counts
        if terms is None:
            expected = "a plan with class counts"
            raise SetupError("router.labels", expected=expected, got="a plan without them")
        count_KCG, _ = expected_class_counts(
            self.statistics.files.sketch,
            self.statistics.noisy_KCG,
            list(self.inventory.num_units.values()),
            terms.epsilon,
        )
        return class_shares(count_KCG, layout)

    def _public_groups(self) -> Tensor:
        """Return the group of each public image, which its pixels decide even where experts see latents."""
        files = self.statistics.files
        # Groups were made from the encoder's features of pixels, and silos assign their images by the same rule.
        pixels = public_images(self.federation, self._plan_id, "fitted", as_latents=False)
        return files.clusters.groups(files.encoder.encode(pixels))

    def _public_conditions(self) -> Tensor:
        """Return the class (N,) or the text (N, L, D) of each public image."""
        if isinstance(self.inventory.plan.condition, ClassCondition):
            return torch.from_numpy(self._column(CLASSES))
        # Many images may share a caption, whose vectors are kept once; this column numbers them.
        caption_N = self._column(CAPTIONS)
        return torch.from_numpy(self._column(TEXTS)[caption_N])

    def _column(self, name: str) -> np.ndarray:
        """Return what was kept of the public images when the plan was made."""
        column = kept_columns(self.federation, self._plan_id).get(name)
        if column is None:
            raise SetupError(
                "public images",
                expected="public images with what the plan's router learns from",
                got=f"a plan without {name.removeprefix('fitted_')}",
                remedy="Make the plan again: `aggregator plan FED --recipe FILE --public FILE`.",
            )
        if column.dtype.kind in "iu":
            return column.astype(np.int64)
        return np.asarray(column)

    @property
    def _plan_id(self) -> str:
        return self.inventory.plan.plan_id


def accepted_experts(inventory: Inventory, device: torch.device) -> LazyExperts:
    """Return every accepted expert, in the manifest's order, with one in memory at a time."""
    plan = inventory.plan
    path = path_named(plan.objective.ensemble_path)
    # In this order the experts are the classes of the router.
    submitted = []
    for silo_id, silo in inventory.silos.items():
        for expert in silo.submission.experts:
            submitted.append((silo_id, silo.folder, expert.file))

    def load(number: int) -> Expert:
        silo_id, folder, file = submitted[number]
        expert = load_expert(
            plan.expert.architecture, plan.expert_shape, folder, file, plan.condition
        )
        return on_path(expert.to(device), plan.objective.of(silo_id), path)

    sizes = [file.bytes for _, _, file in submitted]
    # Room for the largest expert means that each is dropped before the next is loaded, however many silos take part.
    return LazyExperts(load, sizes, memory_bytes=max(sizes))
