"""Writes the page of an evaluation: figures with intervals, samples and reference images, nearest copies.

One HTML file without scripts and without addresses outside itself, and the figures as JSON beside it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddm.evaluation.copies import NearestCopies
from ddm.evaluation.measuring import Evaluation
from ddm.evaluation.reference import Reference
from ddm.evaluation.tables import LIMITS, interval, number
from ddm.io.files import write_atomic
from ddm.pages.pictures import Scale, inline
from ddm.pages.render import render

PAGE = "index.html"
FIGURES = "evaluation.json"
PAGE_MODE = 0o600
MAX_PICTURES = 16  # of a sheet
MAX_PAIRS = 12  # of nearest copies
MEANINGS: Mapping[str, str] = {
    "fid": "distance of the Gaussians of all features; lower is better, biased upwards by small numbers",
    "fid_infinity": "FID extrapolated to infinitely many images on both sides",
    "kid": "squared maximum mean discrepancy; lower is better, unbiased, may be below 0",
    "precision": "share of samples among the reference; low: unlike any real image",
    "recall": "share of the reference among the samples; low: kinds of images are missing",
    "density": "how dense the reference is around samples; 1 where samples are as the reference",
    "coverage": "share of reference images with a sample near; robust to outliers of the samples",
}


PictureInliner = Callable[[Sequence[Tensor]], tuple[str, ...]]
"""Turns images into pictures, each as the address of an inlined file."""


@dataclass(frozen=True)
class EvaluatedSamples:
    """One set of samples and its evaluation.

    Attributes:
        name: its strategy, or its file.
        images: shape (N, ...), in the data's range.
        silo_N: the silo of each sample, by index; None where it is not known.
        evaluation: the figures.
    """

    name: str
    images: Tensor
    silo_N: Tensor | None
    evaluation: Evaluation

    def silo_of(self, number: int) -> int | None:
        """Return the silo of a sample, by index."""
        if self.silo_N is None:
            return None
        return int(self.silo_N[number])


@dataclass(frozen=True)
class EvaluationSheet:
    """Images shown together, as addresses, with the index of their silo."""

    title: str
    silo: int | None
    pictures: Sequence[str]


@dataclass(frozen=True)
class NearestPair:
    """A sample and its nearest reference image.

    Attributes:
        sample: the picture.
        nearest: the picture of the reference image.
        silo: the sample's, by index.
        number: the number of the sample.
        ratio: its distance over the usual one of images held out.
    """

    sample: str
    nearest: str
    silo: int | None
    number: int
    ratio: float


def write_page(
    out: Path,
    document: Mapping[str, Any],
    results: Sequence[EvaluatedSamples],
    reference: Reference,
    silos: Sequence[str],
    value_range: tuple[float, float],
) -> None:
    """Write `index.html` and `evaluation.json`; the same figures and images give the same bytes.

    The page holds images of the reference, so only its owner may read it; the figures hold none.

    Args:
        out: a folder; it is made if it does not exist.
        document: what `--json` prints.
        results: the sets of samples, at least one; pictures are of the first.
        reference: the real images.
        silos: names of the silos.
        value_range: of the images.

    Raises:
        OSError: the folder cannot be written.
    """
    first = results[0]
    # Evenly spread over the reference, whose images are often sorted.
    num_pictures = min(MAX_PICTURES, reference.num)
    sheet_numbers = [n * reference.num // MAX_PICTURES for n in range(num_pictures)]
    needed_numbers = set(sheet_numbers)
    for copies in first.evaluation.copies.values():
        for sample_number in copies.worst[:MAX_PAIRS]:
            needed_numbers.add(int(copies.nearest_index_N[sample_number]))
    # The reference may be larger than memory: all images of the page are taken from one reading.
    reference_images = reference.rows(needed_numbers)

    def draw(images: Sequence[Tensor]) -> tuple[str, ...]:
        if len(images) == 0:
            return ()
        return inline(torch.stack(list(images)), value_range)

    reference_pictures = draw([reference_images[n] for n in dict.fromkeys(sheet_numbers)])
    sheets = [
        EvaluationSheet("reference", None, reference_pictures),
        *_sample_sheets(first, silos, draw),
    ]
    pairs = {}
    for space, copies in first.evaluation.copies.items():
        space_pairs = _nearest_pairs(first, copies, reference_images, draw)
        if space_pairs:
            pairs[space] = space_pairs
    height, width = first.images.shape[-2:]
    page = render(
        "ddm",
        "evaluation.html.jinja",
        document=document,
        results=results,
        sheets=[sheet for sheet in sheets if sheet.pictures],
        pairs=pairs,
        num_reference_pictures=len(reference_pictures),
        silos=silos,
        ratio=f"{width} / {height}",
        meanings=MEANINGS,
        limits=LIMITS,
        number=number,
        interval=interval,
        scale=_scale,
    )
    out.mkdir(parents=True, exist_ok=True)
    # It shows images of the reference, which may be patients'. Anybody who may show them opens the page to others.
    write_atomic(out / PAGE, page.encode("utf-8"), mode=PAGE_MODE)
    write_atomic(out / FIGURES, (json.dumps(document, indent=2) + "\n").encode("utf-8"))


def _sample_sheets(
    samples: EvaluatedSamples,
    silos: Sequence[str],
    draw: PictureInliner,
) -> list[EvaluationSheet]:
    """Return the first samples of each silo, or of all where silos are not known."""
    if samples.silo_N is None:
        pictures = draw(list(samples.images[:MAX_PICTURES]))
        return [EvaluationSheet("samples", None, pictures)]
    sheets = []
    for index, silo in enumerate(silos):
        numbers = torch.nonzero(samples.silo_N == index).flatten()[:MAX_PICTURES]
        if len(numbers):
            pictures = draw(list(samples.images[numbers]))
            sheets.append(EvaluationSheet(silo, index, pictures))
    return sheets


def _nearest_pairs(
    samples: EvaluatedSamples,
    copies: NearestCopies,
    reference_images: Mapping[int, Tensor],
    draw: PictureInliner,
) -> list[NearestPair]:
    numbers = copies.worst[:MAX_PAIRS]
    nearest_images = [reference_images[int(copies.nearest_index_N[n])] for n in numbers]
    sample_pictures = draw([samples.images[n] for n in numbers])
    nearest_pictures = draw(nearest_images)
    pairs = []
    for sample_number, sample, nearest in zip(
        numbers,
        sample_pictures,
        nearest_pictures,
        strict=True,
    ):
        ratio = float(copies.ratio_N[sample_number])
        pairs.append(
            NearestPair(sample, nearest, samples.silo_of(sample_number), sample_number, ratio)
        )
    return pairs


def _scale(results: Sequence[EvaluatedSamples], metric: str) -> Scale:
    """Return the scale of a metric's bars: over all its intervals."""
    values = []
    for result in results:
        estimate = result.evaluation.metrics.get(metric)
        if estimate is not None:
            values += [estimate.low, estimate.high]
    return Scale.over(values)
