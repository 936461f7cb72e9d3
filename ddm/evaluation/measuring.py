"""Evaluates samples against reference images: overall, by silo, by group of the reference, with the nearest copies.

A `Yardstick` holds all that depends on the reference alone, so that several sets of samples are measured by the same
one; `evaluate` makes and uses one in a single call.
"""

# Shape legend: N samples, M reference images, H images held out, D values of one feature.
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddm.errors import DataError, MathError, ShapeError
from ddm.evaluation.copies import NearestCopies, near_copies, pixel_rows
from ddm.evaluation.features import Features
from ddm.evaluation.intervals import Estimate, proportion
from ddm.evaluation.metrics import (
    MIN_IMAGES,
    FeatureSet,
    Floor,
    as_json,
    estimate_as_json,
    measure,
    measure_floor,
)
from ddm.evaluation.neighbours import CrossComparison, compare_with_itself, nearest
from ddm.evaluation.origins import ResolvedOrigins, SampleOrigins
from ddm.evaluation.reference import SILO_COLUMNS, Reference, rows_of_numbers
from ddm.evaluation.shares import ShareError, share_error
from ddm.io.array_input import real_tensor
from ddm.system.progress import ProgressCallback

_ENCODED_TOGETHER = 1024  # images between two reports of progress
_MAX_GROUPS = 100  # of the reference, for which recall is given
_PASSES = 3  # over all images: encoding, and the two comparisons


@dataclass(frozen=True)
class SiloResult:
    """The samples of one silo.

    Attributes:
        num: the number of them.
        share: the share of all samples.
        prior: the share that it should have; None where it is not known.
        metrics: against the whole reference, or against the silo's own images where the reference names silos; empty
            where there are too few samples.
        num_reference: reference images that they were compared with.
    """

    num: int
    share: float
    prior: float | None
    metrics: Mapping[str, Estimate]
    num_reference: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `ddm evaluate --json` prints them."""
        return {
            "num": self.num,
            "share": self.share,
            "prior": self.prior,
            "num_reference": self.num_reference,
            "metrics": as_json(self.metrics),
        }


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What was measured of one set of samples.

    Attributes:
        num: N.
        num_reference: M.
        metrics: `fid`, `fid_infinity`, `kid`, `precision`, `recall`, `density` and `coverage`, each with its interval.
        per_silo: by silo; empty where it is not known which silo a sample came from.
        share_error: of the silos; None where shares or priors are not known.
        recall_by: the share of each group of the reference that the samples reach.
        copies: the nearest reference images, by the space of the search: `pixels` and `features`.
        floor: what perfect samples would score, and the samples at the same numbers; None where there are too few.
        notes: what to keep in mind when reading the figures.
    """

    num: int
    num_reference: int
    metrics: Mapping[str, Estimate]
    per_silo: Mapping[str, SiloResult]
    share_error: ShareError | None
    recall_by: Mapping[str, Estimate]
    copies: Mapping[str, NearestCopies]
    floor: Floor | None
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        figures = [f"{name} {estimate.value:.4g}" for name, estimate in self.metrics.items()]
        compared = f"{self.num} samples with {self.num_reference} reference images"
        return f"Evaluation, {compared}\n  {', '.join(figures)}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `ddm evaluate --json` prints them."""
        share_error = None
        if self.share_error is not None:
            share_error = {
                **estimate_as_json(self.share_error.error),
                "by_chance": self.share_error.by_chance,
            }
        floor = None
        if self.floor is not None:
            floor = {
                "metrics": as_json(self.floor.metrics),
                "samples": as_json(self.floor.samples),
                "num": self.floor.num,
                "num_reference": self.floor.num_reference,
            }
        return {
            "metrics": as_json(self.metrics),
            "per_silo": {name: result.to_json() for name, result in self.per_silo.items()},
            "share_error": share_error,
            "num": self.num,
            "num_reference": self.num_reference,
            "recall_by": as_json(self.recall_by),
            "copies": {space: _copies_json(copies) for space, copies in self.copies.items()},
            "floor": floor,
            "notes": list(self.notes),
        }


def _copies_json(copies: NearestCopies) -> dict[str, Any]:
    return {
        "near_copies": estimate_as_json(copies.near),
        "least_ratio": float(copies.ratio_N.min()),
        "median_ratio": float(copies.ratio_N.median()),
        "threshold": copies.threshold,
        "num_holdout": copies.num_holdout,
    }


class _ProgressCounter:
    """Adds up the images of several passes, and reports the sum."""

    def __init__(self, on_progress: ProgressCallback | None, total: int) -> None:
        self.on_progress = on_progress
        self.num_processed = 0
        self.total = total

    def __call__(self, num: int) -> None:
        self.num_processed += num
        if self.on_progress:
            self.on_progress(min(self.num_processed, self.total), self.total)


@dataclass(frozen=True)
class Yardstick:
    """The reference, ready to measure samples.

    Attributes:
        reference: the images.
        features: turn images into features.
        feature_set: the reference's features, moments and neighbours.
        pixels_MP: the reference images as rows, small.
        holdout_distances: squared distances of images held out to their nearest reference image, by space.
        k: neighbours.
        seed: the seed of intervals and halves.
    """

    reference: Reference
    features: Features
    feature_set: FeatureSet
    pixels_MP: Tensor
    holdout_distances: Mapping[str, Tensor]
    k: int
    seed: int

    @classmethod
    def of(
        cls,
        reference: Reference,
        features: Features,
        *,
        holdout: Reference | None = None,
        k: int = 5,
        seed: int = 0,
        on_progress: ProgressCallback | None = None,
    ) -> "Yardstick":
        """Read and encode a reference.

        Args:
            reference: the images to compare with.
            features: the features to compare by.
            holdout: real images that are not in the reference, whose distances are the scale for copies; without them
                the reference's own distances between neighbours.
            k: which neighbour bounds the ball of a feature, for precision, recall, density and coverage.
            seed: the seed of intervals and halves.
            on_progress: called with the images done and in all, each counting once for every pass over it.

        Raises:
            MathError: too few images, or k out of range.
            DataError, ShapeError: images that do not fit.
        """
        total = _PASSES * reference.num
        if holdout is not None:
            total += holdout.num
        counter = _ProgressCounter(on_progress, total)
        features_MD, pixels_MP = _encode_all(reference, features, counter)
        feature_set = FeatureSet.of(features_MD, k, counter)
        pixel_neighbours = compare_with_itself(pixels_MP, 1, counter)
        holdout_distances = {
            "features": feature_set.neighbours.nearest_N,
            "pixels": pixel_neighbours.nearest_N,
        }
        if holdout is not None:
            features_HD, pixels_HP = _encode_all(holdout, features, counter)
            holdout_distances["features"], _ = nearest(features_HD, features_MD)
            holdout_distances["pixels"], _ = nearest(pixels_HP, pixels_MP)
        return cls(reference, features, feature_set, pixels_MP, holdout_distances, k, seed)

    def judge(
        self,
        samples: Any,
        origins: SampleOrigins | None = None,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> Evaluation:
        """Measure samples.

        Args:
            samples: an array or a tensor, shape (N, ...), as the reference's images.
            origins: the silos that the samples came from; None where they are not known.
            on_progress: called with the images done and in all, each counting once for every pass over it.

        Raises:
            MathError: too few samples, or a prior that is not weights.
            DataError: samples, silos or a prior that are not numbers.
            ShapeError: samples of another shape, or another number of silos than of samples.
        """
        rows = rows_of_numbers(samples, "samples")
        sample_silos = None
        if origins is not None:
            sample_silos = origins.resolve(len(rows))
        counter = _ProgressCounter(on_progress, _PASSES * len(rows))
        features_ND, pixels_NP = _encode_all(Reference.of(rows), self.features, counter)
        num_pixels = self.pixels_MP.shape[1]
        if pixels_NP.shape[1] != num_pixels:
            expected = f"{num_pixels} values, as in the reference"
            raise ShapeError("samples", expected=expected, got=str(pixels_NP.shape[1]))
        sample_set = FeatureSet.of(features_ND, self.k, counter)
        metrics, both = measure(sample_set, self.feature_set, seed=self.seed, on_block=counter)
        floor = measure_floor(sample_set, self.feature_set, seed=self.seed)
        per_silo = {}
        error = None
        if sample_silos is not None:
            per_silo = self._per_silo(features_ND, sample_silos)
            if sample_silos.weights is not None:
                error = share_error(sample_silos.silo_N, sample_silos.weights, seed=self.seed)
        return Evaluation(
            num=len(rows),
            num_reference=self.reference.num,
            metrics=metrics,
            per_silo=per_silo,
            share_error=error,
            recall_by=self._recall_by(both),
            copies=self._nearest_copies(pixels_NP, both),
            floor=floor,
            notes=self._notes(sample_set, sample_silos, has_floor=floor is not None),
        )

    @property
    def _min_images(self) -> int:
        """The fewest images of which metrics can be computed."""
        return max(MIN_IMAGES, self.k + 1)

    def _nearest_copies(self, pixels_NP: Tensor, both: CrossComparison) -> dict[str, NearestCopies]:
        nearest_N, nearest_index_N = nearest(pixels_NP, self.pixels_MP)
        distances = self.holdout_distances
        return {
            "pixels": near_copies(nearest_N, nearest_index_N, distances["pixels"]),
            "features": near_copies(both.nearest_N, both.nearest_index_N, distances["features"]),
        }

    def _per_silo(
        self,
        features_ND: Tensor,
        sample_silos: ResolvedOrigins,
    ) -> dict[str, SiloResult]:
        weights = sample_silos.weights
        num_samples = len(features_ND)
        results = {}
        for index, name in enumerate(sample_silos.names):
            silo_features = features_ND[sample_silos.silo_N == index]
            num = len(silo_features)
            reference = self._reference_of(name)
            metrics: Mapping[str, Estimate] = {}
            if num >= self._min_images:
                silo_set = FeatureSet.of(silo_features, self.k)
                metrics, _ = measure(silo_set, reference, seed=self.seed)
            prior = None
            if weights is not None:
                prior = weights[index] / sum(weights)
            results[name] = SiloResult(
                num=num,
                share=num / num_samples,
                prior=prior,
                metrics=metrics,
                num_reference=len(reference.features_ND),
            )
        return results

    def _reference_of(self, silo: str) -> FeatureSet:
        """Return the reference images of one silo; all where silos are not known, or the silo has too few."""
        # Groups may also be labels, which do not say which silo an image belongs to.
        if self.reference.group_name not in SILO_COLUMNS:
            return self.feature_set
        mask_M = self._group_mask(silo)
        if int(mask_M.sum()) < self._min_images:
            return self.feature_set
        own_features = self.feature_set.features_ND[mask_M]
        return FeatureSet.of(own_features, self.k)

    def _recall_by(self, both: CrossComparison) -> dict[str, Estimate]:
        names = set(self.reference.groups)
        # The recall of a single group would be the recall itself.
        if not 1 < len(names) <= _MAX_GROUPS:
            return {}
        # Shorter names first, which puts numbers in their order.
        ordered_names = sorted(names, key=lambda name: (len(name), name))
        recall = {}
        for name in ordered_names:
            recalled = both.recalled_M[self._group_mask(name)]
            recall[name] = proportion(recalled)
        return recall

    def _group_mask(self, name: str) -> Tensor:
        is_in_group = [group == name for group in self.reference.groups]
        return torch.tensor(is_in_group, dtype=torch.bool)

    def _notes(
        self,
        samples: FeatureSet,
        sample_silos: ResolvedOrigins | None,
        *,
        has_floor: bool,
    ) -> tuple[str, ...]:
        reference = self.feature_set
        dim = samples.features_ND.shape[1]
        num = samples.moments.num
        num_reference = reference.moments.num
        notes = [
            f"FID is biased upwards; it compares {num} samples with {num_reference} reference images."
        ]
        if samples.moments.singular or reference.moments.singular:
            notes.append(
                f"The covariance of a set with no more than {dim} images is singular in {dim} features: FID says "
                "little; read KID, or evaluate more images."
            )
        if 2 * num < num_reference:
            notes.append(
                "Coverage and recall grow with the number of samples: draw about as many as reference images."
            )
        if sample_silos is not None:
            small_silos = []
            for name, num_of_silo in sample_silos.counts().items():
                if num_of_silo <= dim:
                    small_silos.append(name)
            if small_silos:
                notes.append(
                    f"Silos with no more than {dim} samples: {', '.join(small_silos)}. Their FID says little."
                )
        if not has_floor:
            notes.append(
                f"No floor: it takes more than {dim} samples and more than {2 * dim} reference images."
            )
        if float(reference.neighbours.radius_N.min()) == 0.0:
            notes.append(
                f"Some reference images have {self.k} equal ones in these features; their balls have no extent."
            )
        return tuple(notes)


def evaluate(
    samples: Any,
    reference: Any,
    *,
    features: Callable[[Tensor], Tensor] | Features | None = None,
    origins: SampleOrigins | None = None,
    holdout: Any = None,
    k: int = 5,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> Evaluation:
    """Measure samples against a reference.

    Args:
        samples: an array or a tensor, shape (N, ...): images, or features already; any real numbers that NumPy makes an
            array of.
        reference: likewise, shape (M, ...); or a `Reference`, which is read in blocks. For the groups of
            `Reference.of`, such as labels or silos, recall is also given.
        features: from images (B, ...) to features (B, D); without it the values themselves, flattened, are features.
        origins: the silo of each sample, and the shares that silos should have.
        holdout: real images that are not in the reference, as a scale for nearest copies.
        k: neighbours of precision, recall, density and coverage.
        seed: the seed of intervals and halves; the same call gives the same figures.
        on_progress: called with the images done and the images in all, in two rounds.

    Returns:
        Figures with 95% intervals; `Evaluation.to_json` for a document.

    Raises:
        MathError: fewer than 8 images, or than k + 1; or a prior that is not weights.
        DataError: an argument that holds no real numbers, such as complex ones.
        ShapeError: samples, reference or silos that do not fit each other.
        NumericalError: values that are not finite.
    """
    rows = rows_of_numbers(samples, "samples")
    if not isinstance(reference, Reference):
        reference = Reference.of(reference)
    if holdout is not None and not isinstance(holdout, Reference):
        holdout = Reference.of(holdout)
    if origins is not None:
        # Wrong numbers are refused before the reference is encoded, which may take minutes.
        origins.resolve(len(rows))
    yardstick = Yardstick.of(
        reference,
        _as_features(features),
        holdout=holdout,
        k=k,
        seed=seed,
        on_progress=on_progress,
    )
    return yardstick.judge(rows, origins, on_progress=on_progress)


def _as_features(features: Callable[[Tensor], Tensor] | Features | None) -> Features:
    if isinstance(features, Features):
        return features
    if features is None:
        return Features("values", digest=None, dim=0, encode=_flatten)
    if not callable(features):
        got = type(features).__name__
        raise DataError("features", expected="a function from images to features", got=got)
    return Features("given", digest=None, dim=0, encode=features)


def _flatten(images: Tensor) -> Tensor:
    return images.flatten(1).float()


def _encode_all(
    images: Reference,
    features: Features,
    counter: _ProgressCounter,
) -> tuple[Tensor, Tensor]:
    """Return all features, shape (N, D), and all images as small rows, shape (N, P)."""
    feature_blocks: list[Tensor] = []
    pixel_blocks: list[Tensor] = []
    for images_read_together in images.blocks():
        for block in torch.split(images_read_together, _ENCODED_TOGETHER):
            features_BD = real_tensor(features.encode(block), "features")
            if features_BD.ndim != 2 or len(features_BD) != len(block):
                expected = f"shape ({len(block)}, D), a row for each image"
                got = f"shape {tuple(features_BD.shape)}"
                raise ShapeError("features", expected=expected, got=got)
            # Kept in float32, because all stay in memory; sums and products over them are taken in float64, block by
            # block.
            feature_blocks.append(features_BD.float().cpu())
            pixel_blocks.append(pixel_rows(block))
            counter(len(block))
    if not feature_blocks:
        raise MathError("images", expected=f"at least {MIN_IMAGES}", got="an empty array")
    return torch.cat(feature_blocks), torch.cat(pixel_blocks)
