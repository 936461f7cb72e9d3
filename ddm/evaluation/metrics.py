"""The metrics of one set of samples against a reference, and of the reference against itself, from features alone."""

# Shape legend: N samples, M reference features, D values of one feature.
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddm.errors import MathError, NumericalError, ShapeError
from ddm.evaluation.frechet import Moments, fid_infinity_of, frechet_terms, transport
from ddm.evaluation.intervals import Estimate, bootstrap_estimate, proportion
from ddm.evaluation.neighbours import (
    BlockReport,
    CrossComparison,
    SelfComparison,
    compare_sets,
    compare_with_itself,
    kernel_distance,
)

MIN_IMAGES = 8  # below which no metric means anything
_DOUBLE_BYTES = 8
_FLOAT_BYTES = 4
_NUM_MATRICES = 12  # of D x D values, alive together
_BLOCKS_BYTES = 1 << 28  # of products, as `ddm.evaluation.neighbours` computes them


@dataclass(frozen=True)
class FeatureSet:
    """One set of features, with all that does not depend on what it is compared with.

    Attributes:
        features_ND: float32.
        moments: for the Fréchet distance.
        neighbours: distances to neighbours, and kernel sums.
    """

    features_ND: Tensor
    moments: Moments
    neighbours: SelfComparison

    @classmethod
    def of(
        cls,
        features_ND: Tensor,
        k: int,
        on_block: BlockReport | None = None,
    ) -> "FeatureSet":
        """Compute moments and neighbours.

        Raises:
            ShapeError: the features are not a matrix.
            MathError: too few features, or k out of range.
            NumericalError: features that are not finite.
        """
        if features_ND.ndim != 2:
            got = str(tuple(features_ND.shape))
            raise ShapeError("features", expected="shape (N, D)", got=got)
        num_needed = max(MIN_IMAGES, k + 1)
        if k < 1 or len(features_ND) < num_needed:
            raise MathError(
                "features",
                expected=f"at least {num_needed} images for {k} neighbours",
                got=str(len(features_ND)),
                remedy="Evaluate more images, or ask for fewer neighbours.",
            )
        if not bool(features_ND.isfinite().all()):
            raise NumericalError(
                "features",
                expected="finite numbers",
                got="NaN or infinity",
                remedy="Leave out images that hold NaN or infinity, and check the weights of the features.",
            )
        moments = Moments.of(features_ND)
        neighbours = compare_with_itself(features_ND, k, on_block)
        return cls(features_ND, moments, neighbours)


@dataclass(frozen=True)
class Floor:
    """What perfect samples would score, and what the samples score under the same numbers of images.

    FID falls with the number of images on either side, and coverage and recall rise with that of samples. So the floor
    cannot be compared with figures of all samples against the whole reference: those have more images on both sides,
    and would look better than perfect. Both comparisons here are with the same half of the reference.

    Attributes:
        metrics: the metrics of the other half of the reference, in the samples' place; as `measure` returns them.
        samples: the measures of the same number of samples.
        num: images in the samples' place, in both.
        num_reference: images of the half that both are compared with.
    """

    metrics: Mapping[str, Estimate]
    samples: Mapping[str, Estimate]
    num: int
    num_reference: int


def measure(
    samples: FeatureSet,
    reference: FeatureSet,
    *,
    seed: int = 0,
    on_block: BlockReport | None = None,
) -> tuple[dict[str, Estimate], CrossComparison]:
    """Compute every metric of samples against a reference.

    Args:
        samples: those of the samples.
        reference: of the reference, with the same k.
        seed: the seed of intervals and halves.
        on_block: called after each block of samples.

    Returns:
        `fid`, `fid_infinity` (where both sets have more than twice as many images as features), `kid`, `precision`,
        `recall`, `density` and `coverage`, and the comparison by neighbours.

    Raises:
        ShapeError: features of two lengths.
    """
    dim = samples.features_ND.shape[1]
    reference_dim = reference.features_ND.shape[1]
    if dim != reference_dim:
        expected = f"{reference_dim} values, as of the reference"
        raise ShapeError("features", expected=expected, got=str(dim))
    metrics = _frechet_metrics(samples, reference, seed)
    both = compare_sets(
        samples.features_ND,
        reference.features_ND,
        samples.neighbours,
        reference.neighbours,
        on_block,
    )
    kid, kid_terms = kernel_distance(samples.neighbours, reference.neighbours, both)
    # Not cut at 0 as FID is: the unbiased estimate itself may be below 0.
    metrics["kid"] = bootstrap_estimate(kid, kid_terms, seed=seed)
    metrics["precision"] = proportion(both.inside_N)
    metrics["recall"] = proportion(both.recalled_M)
    density_N = both.balls_N.double() / reference.neighbours.k
    # Density is a mean over samples, so that its terms are the samples' own values; it has no upper bound.
    mean_density = float(density_N.mean())
    density = bootstrap_estimate(mean_density, [density_N], seed=seed)
    metrics["density"] = replace(density, low=max(density.low, 0.0))
    metrics["coverage"] = proportion(both.covered_M)
    return metrics, both


def _frechet_metrics(
    samples: FeatureSet,
    reference: FeatureSet,
    seed: int,
) -> dict[str, Estimate]:
    a = samples.moments
    b = reference.moments
    maps = transport(a, b)
    terms = [
        frechet_terms(samples.features_ND, a, b, maps.map_to_b_DD),
        frechet_terms(reference.features_ND, b, a, maps.map_to_a_DD),
    ]
    fid = bootstrap_estimate(maps.distance, terms, seed=seed)
    # A distance is at least 0, but a resampled shift may be larger than the distance.
    metrics = {"fid": replace(fid, low=max(fid.low, 0.0))}
    limit = fid_infinity_of(
        maps.distance,
        samples.features_ND,
        reference.features_ND,
        seed=seed,
    )
    if limit is not None:
        # To first order it changes with an image as the distance does, so that the interval only moves.
        shift = limit - fid.value
        metrics["fid_infinity"] = Estimate(limit, fid.low + shift, fid.high + shift)
    return metrics


def measure_floor(
    samples: FeatureSet,
    reference: FeatureSet,
    *,
    seed: int = 0,
) -> Floor | None:
    """Measure images of the reference, and as many samples, against the same half of the reference.

    Args:
        samples: those of the samples.
        reference: of the reference, with the same k.
        seed: the seed of the choice of images.

    Returns:
        The figures; None where a side has no more images than features.
    """
    num_reference, dim = reference.features_ND.shape
    half = num_reference // 2
    num = min(half, len(samples.features_ND))
    k = reference.neighbours.k
    # With no more images than features the covariance is singular, and FID says little.
    if num <= max(dim, k, MIN_IMAGES):
        return None
    generator = torch.Generator().manual_seed(seed)
    reference_order_M = torch.randperm(num_reference, generator=generator)
    sample_order_N = torch.randperm(len(samples.features_ND), generator=generator)
    common_half = FeatureSet.of(reference.features_ND[reference_order_M[half:]], k)
    perfect = FeatureSet.of(reference.features_ND[reference_order_M[:num]], k)
    chosen_samples = FeatureSet.of(samples.features_ND[sample_order_N[:num]], k)
    perfect_metrics, _ = measure(perfect, common_half, seed=seed)
    sample_metrics, _ = measure(chosen_samples, common_half, seed=seed)
    return Floor(
        metrics=perfect_metrics,
        samples=sample_metrics,
        num=num,
        num_reference=num_reference - half,
    )


def metrics_bytes(
    num: int,
    num_reference: int,
    dim: int,
    pixels: int,
) -> int:
    """Return the bytes that an evaluation takes beside the samples, by its numbers alone.

    Args:
        num: samples.
        num_reference: reference images.
        dim: values of one feature.
        pixels: values of one image in the search for copies.
    """
    # Three times: all images, those of the halves, and those of one silo.
    row_bytes = 3 * (num + num_reference) * (dim + pixels) * _FLOAT_BYTES
    matrix_bytes = _NUM_MATRICES * _DOUBLE_BYTES * dim**2
    return row_bytes + matrix_bytes + _BLOCKS_BYTES


def as_json(metrics: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    """Return metrics as JSON prints them."""
    return {name: estimate_as_json(estimate) for name, estimate in metrics.items()}


def estimate_as_json(estimate: Estimate) -> dict[str, float]:
    """Return one figure as JSON prints it."""
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
