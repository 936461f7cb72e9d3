"""Evaluates samples against reference images: overall, by silo, by group of the reference, with the nearest copies.

A `Yardstick` holds all that depends on the reference alone, so that several sets of samples are judged by the same one;
`evaluate` makes and uses one in a single call.
"""

# Shape legend: N samples, M reference images, H images held out, D values of one feature.
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from ddm.errors import DataError, MathError, ShapeError
from ddm.evaluation.copies import Copies, near_copies, pixels
from ddm.evaluation.features import Features
from ddm.evaluation.intervals import Estimate, proportion
from ddm.evaluation.metrics import LEAST, Side, as_json, floor, measure
from ddm.evaluation.neighbours import Between, nearest, within
from ddm.evaluation.reference import SILO_COLUMNS, Reference, rows_of_numbers
from ddm.evaluation.shares import ShareError, share_error
from ddm.io.array_input import real_tensor

Progress = Callable[[int, int], None]
"""Called with the images done and the images in all, each image counting once for every pass over it."""

_ENCODED = 1024  # samples that are encoded between two reports of progress


@dataclass(frozen=True)
class SiloResult:
    """The samples of one silo.

    Attributes:
        num: how many.
        share: of all samples.
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


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one set of samples.

    Attributes:
        num: N.
        num_reference: M.
        metrics: `fid`, `fid_infinity`, `kid`, `precision`, `recall`, `density` and `coverage`, each with its interval.
        per_silo: by silo; empty where it is not known which silo a sample came from.
        share_error: of the silos; None where shares or priors are not known.
        recall_by: the share of each group of the reference that the samples reach.
        copies: the nearest reference images, by the space in which they were looked for: `pixels` and `features`.
        floor: one half of the reference against the other; None where it is too small.
        notes: what to keep in mind when reading the figures.
    """

    num: int
    num_reference: int
    metrics: Mapping[str, Estimate]
    per_silo: Mapping[str, SiloResult]
    share_error: ShareError | None
    recall_by: Mapping[str, Estimate]
    copies: Mapping[str, Copies]
    floor: tuple[Mapping[str, Estimate], int, int] | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `ddm evaluate --json` prints them."""
        halves = self.floor
        return {
            "metrics": as_json(self.metrics),
            "per_silo": {
                name: {
                    "num": each.num,
                    "share": each.share,
                    "prior": each.prior,
                    "num_reference": each.num_reference,
                }
                | {"metrics": as_json(each.metrics)}
                for name, each in self.per_silo.items()
            },
            "share_error": None
            if self.share_error is None
            else as_json({"it": self.share_error.error})["it"]
            | {"by_chance": self.share_error.by_chance},
            "num": self.num,
            "num_reference": self.num_reference,
            "recall_by": as_json(self.recall_by),
            "copies": {
                name: as_json({"near_copies": each.near})
                | {
                    "least_ratio": float(each.ratio_N.min()),
                    "median_ratio": float(each.ratio_N.median()),
                }
                | {"threshold": each.threshold, "num_holdout": each.num_holdout}
                for name, each in self.copies.items()
            },
            "floor": None
            if halves is None
            else {"metrics": as_json(halves[0]), "num": halves[1], "num_reference": halves[2]},
            "notes": list(self.notes),
        }


class _Count:
    """Adds up what several passes have done."""

    def __init__(self, on_progress: Progress | None, total: int) -> None:
        self.on_progress, self.done, self.total = on_progress, 0, total

    def __call__(self, num: int) -> None:
        self.done += num
        if self.on_progress:
            self.on_progress(min(self.done, self.total), self.total)


@dataclass(frozen=True)
class Yardstick:
    """The reference, ready to judge samples.

    Attributes:
        reference: the images.
        features: turn images into features.
        side: the reference's features, moments and neighbours.
        pixels_MP: the reference images as rows, small.
        holdout: squared distances of images held out to their nearest reference image, by space.
        k: neighbours.
        seed: of intervals and halves.
    """

    reference: Reference
    features: Features
    side: Side
    pixels_MP: Tensor
    holdout: Mapping[str, Tensor]
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
        on_progress: Progress | None = None,
    ) -> "Yardstick":
        """Read and encode a reference.

        Args:
            reference: the images to compare with.
            features: the features to compare by.
            holdout: real images that are not in the reference, on whose distances copies are judged; without them the
                reference's own distances between neighbours.
            k: which neighbour bounds the ball of a feature, for precision, recall, density and coverage.
            seed: of intervals and halves.
            on_progress: see `Progress`.

        Raises:
            MathError: too few images, or k out of range.
            DataError, ShapeError: images that do not fit.
        """
        tick = _Count(on_progress, 3 * reference.num + (holdout.num if holdout else 0))
        features_MD, pixels_MP = _encoded(reference, features, tick)
        side = Side.of(features_MD, k, tick)
        own = {"features": side.within.nearest_N, "pixels": within(pixels_MP, 1, tick).nearest_N}
        if holdout is not None:
            rows = _encoded(holdout, features, tick)
            own = {
                "features": nearest(rows[0], features_MD)[0],
                "pixels": nearest(rows[1], pixels_MP)[0],
            }
        return cls(reference, features, side, pixels_MP, own, k, seed)

    def judge(
        self,
        samples: Any,
        *,
        silo_N: Any = None,
        silos: Sequence[str] = (),
        prior: Any = None,
        on_progress: Progress | None = None,
    ) -> Evaluation:
        """Measure samples.

        Args:
            samples: an array or a tensor, shape (N, ...), as the reference's images.
            silo_N: the index of the silo that each sample came from; None where it is not known.
            silos: the silos' names.
            prior: the share that each silo should have, in any unit; only used where `silo_N` is known.
            on_progress: see `Progress`.

        Raises:
            MathError: too few samples, or a prior that is no weights.
            DataError: samples, silos or a prior that are no numbers.
            ShapeError: samples of another shape, or as many silos as samples are needed.
        """
        rows = rows_of_numbers(samples, "samples")
        if silo_N is not None:
            silo_N = _silo_numbers(silo_N, len(rows), len(silos))
            prior = None if prior is None else _weights(prior, len(silos))
        tick = _Count(on_progress, 3 * len(rows))
        features_ND, pixels_NP = _encoded(Reference.of(rows), self.features, tick)
        if pixels_NP.shape[1] != self.pixels_MP.shape[1]:
            expected = f"{self.pixels_MP.shape[1]} values, as in the reference"
            raise ShapeError("samples", expected=expected, got=str(pixels_NP.shape[1]))
        own = Side.of(features_ND, self.k, tick)
        metrics, both = measure(own, self.side, seed=self.seed, tick=tick)
        copies = {
            "pixels": near_copies(*nearest(pixels_NP, self.pixels_MP), self.holdout["pixels"]),
            "features": near_copies(both.nearest_N, both.which_N, self.holdout["features"]),
        }
        known = silo_N is not None and prior is not None
        halves = floor(self.side, len(rows), seed=self.seed)
        return Evaluation(
            num=len(rows),
            num_reference=self.reference.num,
            metrics=metrics,
            per_silo={} if silo_N is None else self._per_silo(features_ND, silo_N, silos, prior),
            share_error=share_error(silo_N, prior, seed=self.seed) if known else None,
            recall_by=self._recall_by(both),
            copies=copies,
            floor=halves,
            notes=self._notes(own, silo_N, silos, halves is not None),
        )

    def _per_silo(
        self,
        features_ND: Tensor,
        silo_N: Tensor,
        silos: Sequence[str],
        prior: Sequence[float] | None,
    ) -> dict[str, SiloResult]:
        groups = self.reference.groups
        found, total = {}, sum(prior) if prior is not None else 1.0
        for index, name in enumerate(silos):
            own_ND = features_ND[silo_N == index]
            side = self.side
            if self.reference.group_name in SILO_COLUMNS and name in groups:
                side = self._part(torch.tensor([group == name for group in groups]))
            enough = len(own_ND) >= max(LEAST, self.k + 1)
            metrics = measure(Side.of(own_ND, self.k), side, seed=self.seed)[0] if enough else {}
            due = None if prior is None else prior[index] / total
            found[name] = SiloResult(
                len(own_ND), len(own_ND) / len(silo_N), due, metrics, len(side.features_ND)
            )
        return found

    def _part(self, mask_M: Tensor) -> Side:
        """Return the reference images of one silo, or all where there are too few."""
        enough = int(mask_M.sum()) >= max(LEAST, self.k + 1)
        return Side.of(self.side.features_ND[mask_M], self.k) if enough else self.side

    def _recall_by(self, both: Between) -> dict[str, Estimate]:
        groups = self.reference.groups
        if not 1 < len(set(groups)) <= 100:
            return {}
        return {
            name: proportion(both.recalled_M[torch.tensor([group == name for group in groups])])
            for name in sorted(set(groups), key=lambda text: (len(text), text))
        }

    def _notes(
        self, own: Side, silo_N: Tensor | None, silos: Sequence[str], has_floor: bool
    ) -> tuple[str, ...]:
        dim, sizes = own.features_ND.shape[1], (own.moments.num, self.side.moments.num)
        notes = [
            f"FID is biased upwards; it compares {sizes[0]} samples with {sizes[1]} reference images."
        ]
        if own.moments.singular or self.side.moments.singular:
            notes.append(
                f"The covariance of a set with no more than {dim} images is singular in {dim} features: FID says "
                "little; read KID, or evaluate more images."
            )
        if 2 * sizes[0] < sizes[1]:
            notes.append(
                "Coverage and recall grow with the number of samples: draw about as many as reference images."
            )
        if silo_N is not None:
            counts = torch.bincount(silo_N, minlength=len(silos)).tolist()
            if few := [name for name, count in zip(silos, counts, strict=True) if count <= dim]:
                notes.append(
                    f"Silos with no more than {dim} samples: {', '.join(few)}. Their FID says little."
                )
        if not has_floor:
            notes.append(
                f"No floor: it takes more than {dim} samples and more than {2 * dim} reference images."
            )
        if float(self.side.within.radius_N.min()) == 0.0:
            notes.append(
                f"Some reference images have {self.k} equal ones in these features; their balls have no extent."
            )
        return tuple(notes)


def evaluate(
    samples: Any,
    reference: Any,
    *,
    features: Callable[[Tensor], Tensor] | Features | None = None,
    silo_N: Any = None,
    silos: Sequence[str] = (),
    prior: Any = None,
    groups: Sequence[object] = (),
    holdout: Any = None,
    k: int = 5,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Measure samples against a reference.

    Args:
        samples: an array or a tensor, shape (N, ...): images, or features already; any real numbers that NumPy makes an
            array of.
        reference: likewise, shape (M, ...); or a `Reference`, which is read in blocks.
        features: from images (B, ...) to features (B, D); without it the values themselves, flattened, are features.
        silo_N: the index of the silo of each sample, such as `Samples.expert_N`.
        silos: the silos' names, in order; by default their indices.
        prior: the share that each silo should have, in any unit.
        groups: a label or silo of each reference image: recall is also given for each.
        holdout: real images that are not in the reference, as a scale for nearest copies.
        k: neighbours of precision, recall, density and coverage.
        seed: of intervals and halves; the same call gives the same figures.
        on_progress: called with the images done and the images in all, in two rounds.

    Returns:
        Figures with 95% intervals; `Evaluation.to_json` for a document.

    Raises:
        MathError: fewer than 8 images, or than k + 1; or a prior that is no weights.
        DataError: an argument that holds no real numbers, such as complex ones.
        ShapeError: samples, reference or silos that do not fit each other.
        NumericalError: values that are not finite.
    """
    rows = rows_of_numbers(samples, "samples")
    source = reference if isinstance(reference, Reference) else Reference.of(reference, groups)
    held = holdout if isinstance(holdout, Reference) or holdout is None else Reference.of(holdout)
    if not isinstance(features, Features):
        if features is not None and not callable(features):
            got = type(features).__name__
            raise DataError("features", expected="a function from images to features", got=got)
        features = Features("values" if features is None else "given", None, 0, features or _flat)
    silo = None if silo_N is None else _silo_numbers(silo_N, len(rows), len(silos) or None)
    if silo is not None and not len(silos):
        num_weights = 0 if prior is None else real_tensor(prior, "prior").numel()
        num_silos = max(int(silo.max()) + 1, num_weights)
        silos = tuple(str(index) for index in range(num_silos))
    yardstick = Yardstick.of(
        source, features, holdout=held, k=k, seed=seed, on_progress=on_progress
    )
    return yardstick.judge(rows, silo_N=silo, silos=silos, prior=prior, on_progress=on_progress)


def _silo_numbers(silo_N: Any, num_samples: int, num_silos: int | None) -> Tensor:
    """Return the index of the silo of each sample, int64.

    Args:
        silo_N: the caller's.
        num_samples: N.
        num_silos: how many silos there are; None where their numbers alone say it.

    Raises:
        DataError: no numbers.
        ShapeError: not one whole number from 0, of a silo that there is, for each sample.
    """
    numbers = real_tensor(silo_N, "silo_N").cpu()
    whole = numbers.long()
    fits = tuple(numbers.shape) == (num_samples,) and num_samples > 0
    # A number that is not whole would become that of another silo, and NaN that of any.
    if fits and bool((whole == numbers).all()):
        lowest, highest = int(whole.min()), int(whole.max())
        if lowest >= 0 and (num_silos is None or highest < num_silos):
            return whole
    silos = "a silo" if num_silos is None else f"one of {num_silos} silos"
    got = f"shape {tuple(numbers.shape)}" if not fits else "other numbers"
    raise ShapeError(
        "silo_N", expected=f"the number of {silos} for each of {num_samples} samples", got=got
    )


def _weights(prior: Any, num_silos: int) -> list[float]:
    """Return one weight for each silo, in the caller's unit.

    Raises:
        DataError: no numbers.
        ShapeError: another number of weights.
        MathError: weights below 0, that are not finite, or all 0.
    """
    weight_S = real_tensor(prior, "prior").double().cpu()
    if tuple(weight_S.shape) != (num_silos,):
        expected = f"{num_silos} weights, one for each silo"
        raise ShapeError("prior", expected=expected, got=f"shape {tuple(weight_S.shape)}")
    total = float(weight_S.sum())
    if not bool((weight_S >= 0).all()) or not 0 < total < inf:
        raise MathError(
            "prior", expected="finite weights of at least 0, not all 0", got="other weights"
        )
    weights: list[float] = weight_S.tolist()
    return weights


def _flat(images: Tensor) -> Tensor:
    return images.flatten(1).float()


def _encoded(source: Reference, features: Features, tick: _Count) -> tuple[Tensor, Tensor]:
    """Return all features, shape (N, D), and all images as small rows, shape (N, P)."""
    all_features: list[Tensor] = []
    all_pixels: list[Tensor] = []
    for images in source.blocks():
        for block in torch.split(images, _ENCODED):
            encoded = real_tensor(features.encode(block), "features")
            if encoded.ndim != 2 or len(encoded) != len(block):
                got = f"shape {tuple(encoded.shape)}"
                raise ShapeError(
                    "features", expected=f"shape ({len(block)}, D), a row for each image", got=got
                )
            all_features.append(encoded.float().cpu())
            all_pixels.append(pixels(block))
            tick(len(block))
    if not all_features:
        raise MathError("images", expected=f"at least {LEAST}", got="an empty array")
    return torch.cat(all_features), torch.cat(all_pixels)
