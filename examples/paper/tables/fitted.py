"""Routers of a federation at a privacy budget, for the experts of an ensemble: statistics drawn by the silos' code."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.evaluation.intervals import bootstrap_estimate
from ddm.protocol.routers import SamplesSettings
from ddm.routers.base import Router
from ddm.routers.labelled import Labelled
from ddm.routers.samples import draw_from_experts, fit_samples
from ddm.sampling.strategies import Strategy
from examples.paper.privacy.families import (
    PATH,
    Fitted,
    RouterTerms,
    as_published,
    fit_exact,
    fit_family,
)
from examples.paper.privacy.measure import measure
from examples.paper.privacy.public import PublicParts, fit_public_parts
from examples.paper.privacy.shares import PriorOnly
from examples.paper.privacy.worlds import Dataset
from examples.paper.privacy.worlds import PrivateWorld as Silos
from examples.paper.tables.data import Part, World
from examples.paper.tables.models import Made
from examples.paper.tables.presets import Preset
from examples.paper.tables.results import Figure
from examples.paper.tables.rows import FittedRouter

# Shape legend: N images, K silos, C classes.

_MOST_HELD_OUT = 2000
_MOST_GROUPS = 64
_PUBLIC_A_GROUP = 8
_RANK = 64
_RELEASED_RANK = 12
_CORRECTIONS = 3  # after each step of a completion
_EVIDENCE = 1.0  # epsilon of the counts by which the router of drawn images is calibrated


@dataclass(frozen=True)
class Routers:
    """The routers for the silos of one ensemble and one seed, each fitted once.

    Attributes:
        silos: public, private and test images, as `examples.paper.privacy` divides them.
        judging: the same with validation images in the place of test images.
        parts: encoder, clusters and sketch of the public images.
        made: the ensemble.
        settings: of the transformer on drawn images, or on training images.
        learned_steps: of a learned router.
        seed: of all.
        device: where a router on images is trained.
        fitted: what was fitted.
    """

    silos: Silos
    judging: Silos
    parts: PublicParts
    made: Made
    settings: SamplesSettings
    learned_steps: int
    seed: int
    device: torch.device
    fitted: dict[FittedRouter, Router | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, world: World, preset: Preset, made: Made, seed: int, device: torch.device
    ) -> "Routers":
        """Fit the public parts on the public images, and divide the private ones as the ensemble has them."""
        silos, judging = (
            _silos(world, preset, made.own_K, part) for part in (world.test, world.validation)
        )
        parts = fit_public_parts(silos, "pca", 0, seed, lambda _: None)
        return cls(
            silos, judging, parts, made, preset.transformer, preset.learned_steps, seed, device
        )

    def get(self, wanted: FittedRouter) -> Router | None:
        """Return a router; None for the prior alone."""
        if wanted not in self.fitted:
            self.fitted[wanted] = self._fit(wanted)
        return self.fitted[wanted]

    def _fit(self, wanted: FittedRouter) -> Router | None:
        match wanted.family:
            case "prior":
                return None
            case "own":
                return self.made.ensemble.router
            case "labels":
                return as_published(
                    self._exactly(self._from_training_images()), self.silos, self.parts, self.seed
                )
            case "samples":
                evidence = self._private("counts", _EVIDENCE).evidence
                fitted = Fitted(self._from_samples(), evidence)
                return as_published(fitted, self.silos, self.parts, self.seed)
            case "counts" | "learned":
                if wanted.epsilon is None:
                    fitted = fit_exact(self.silos, self.parts)
                else:
                    fitted = self._private(wanted.family, wanted.epsilon)
                return as_published(fitted, self.silos, self.parts, self.seed)

    def _private(self, family: str, epsilon: float) -> Fitted:
        return fit_family(
            self.silos, self.parts, RouterTerms(family, epsilon, self.learned_steps), self.seed
        )

    def _from_samples(self) -> Router:
        ensemble = self.made.ensemble
        num = self.settings.images_per_expert
        device = self.device
        images_EN = draw_from_experts(
            ensemble.experts, ensemble.shape, num, self.seed, PATH, None, device=device
        )
        return fit_samples(Labelled.drawn(images_EN), self.settings, PATH, self.seed, device=device)

    def _from_training_images(self) -> Router:
        own_K = self.silos.silos
        silo_N = torch.arange(len(own_K)).repeat_interleave(
            torch.tensor([len(own) for own in own_K])
        )
        images = Labelled.of_experts(torch.cat(list(own_K)), silo_N, len(own_K))
        return fit_samples(images, self.settings, PATH, self.seed, device=self.device)

    def _exactly(self, router: Router) -> Fitted:
        """A router that may know everything, with exact counts as evidence for its temperature."""
        return Fitted(router, fit_exact(self.silos, self.parts).evidence)

    def figures(self, wanted: FittedRouter) -> dict[str, Figure]:
        """Return cross-entropy and share error of a router on noised test images, averaged over noise levels.

        Both are against the exact shares of each image's class, by which the silos were drawn. Routers are chosen by
        the cross-entropy on validation images.
        """
        measured = measure(self.get(wanted), self.silos)
        chosen_by = measure(self.get(wanted), self.judging)
        error = sum(measured.share_error_T) / len(measured.share_error_T)
        return {
            "cross_entropy": _mean(measured.loss_TN.mean(0), self.seed),
            "validation_cross_entropy": _mean(chosen_by.loss_TN.mean(0), self.seed),
            "router_share_error": Figure(value=error),
        }


def completion_error(
    ensemble: Ensemble, images: Tensor, strategy: Strategy, steps: int, seed: int
) -> Figure:
    """Return how far completions of the left half of images are from their right half: root mean square, per image."""
    known = torch.zeros(images.shape[-2:], dtype=torch.bool)
    known[:, : images.shape[-1] // 2] = True
    drawn = ensemble.inpaint(
        images, known, corrections=_CORRECTIONS, strategy=strategy, steps=steps, seed=seed
    )
    wrong = (drawn.images.clamp(-1.0, 1.0).cpu() - images)[..., ~known]
    return _mean(wrong.flatten(1).double().square().mean(1).sqrt(), seed)


def with_router(ensemble: Ensemble, router: Router | None) -> Ensemble:
    """Return the ensemble with another router; one that answers the prior for None."""
    return replace(ensemble, router=router or PriorOnly(len(ensemble.experts)))


def _mean(value_N: Tensor, seed: int) -> Figure:
    return Figure.of(bootstrap_estimate(float(value_N.mean()), [value_N], seed=seed))


def _silos(world: World, preset: Preset, own_K: Sequence[Tensor], judged: Part) -> Silos:
    public = world.public
    values = world.train.images[0].numel()
    num_held_out = min(_MOST_HELD_OUT, len(public) // 3)
    num_public = len(public) - num_held_out
    held_CK = torch.stack(
        [world.train.label_N[own].bincount(minlength=world.num_classes) for own in own_K], 1
    ).double()
    prior_K = held_CK.sum(0) / held_CK.sum()
    soft_CK = torch.where(
        held_CK.sum(1, keepdim=True) > 0, held_CK / held_CK.sum(1, keepdim=True), prior_K
    )
    rank = min(_RANK, values // 2)
    data = Dataset(
        name=world.name,
        num_silos=len(own_K),
        num_private=len(world.train),
        num_held_out=num_held_out,
        num_groups=min(_MOST_GROUPS, num_public // _PUBLIC_A_GROUP),
        rank=rank,
        released_rank=min(_RELEASED_RANK, rank),
        pca_dim=preset.pca_dim,
    )
    return Silos(
        dataset=data,
        public=public.images[:num_public],
        held_out=public.images[num_public:],
        public_label=public.label_N[:num_public],
        silos=tuple(world.train.images[own] for own in own_K),
        test=judged.images,
        soft_NK=soft_CK[judged.label_N],
    )
