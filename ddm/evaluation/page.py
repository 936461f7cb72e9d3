"""Writes the page of an evaluation: figures with intervals, samples beside reference images, nearest copies.

One HTML file without scripts and without addresses outside itself, and the figures as JSON beside it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddm.evaluation.measuring import Evaluation
from ddm.evaluation.reference import Reference
from ddm.evaluation.tables import LIMITS, interval, number
from ddm.io.files import write_atomic
from ddm.pages.pictures import Scale, inline
from ddm.pages.render import render

PAGE, FIGURES = "index.html", "evaluation.json"
SHOWN, SHOWN_PAIRS = 16, 12  # images of a sheet; nearest copies
MEANINGS: Mapping[str, str] = {
    "fid": "distance of the Gaussians of all features; lower is better, biased upwards by small numbers",
    "fid_infinity": "FID extrapolated to infinitely many images on both sides",
    "kid": "squared maximum mean discrepancy; lower is better, unbiased, may be below 0",
    "precision": "share of samples among the reference; low: unlike any real image",
    "recall": "share of the reference among the samples; low: kinds of images are missing",
    "density": "how densely the reference lies around samples; 1 where samples are as the reference",
    "coverage": "share of reference images with a sample near; robust to outliers of the samples",
}


@dataclass(frozen=True)
class Shown:
    """One set of samples and what was measured of it.

    Attributes:
        name: its strategy, or its file.
        images: shape (N, ...), in the data's range.
        silo_N: the silo of each sample, by index; None where it is not known.
        found: the figures.
    """

    name: str
    images: Tensor
    silo_N: Tensor | None
    found: Evaluation


@dataclass(frozen=True)
class Sheet:
    """Images shown together, as addresses, with the index of their silo."""

    title: str
    silo: int | None
    pictures: Sequence[str]


@dataclass(frozen=True)
class Pair:
    """A sample beside its nearest reference image.

    Attributes:
        sample: the picture.
        nearest: the picture of the reference image.
        silo: the sample's, by index.
        number: of the sample.
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
    results: Sequence[Shown],
    reference: Reference,
    silos: Sequence[str],
    value_range: tuple[float, float],
) -> None:
    """Write `index.html` and `evaluation.json`; the same figures and images give the same bytes.

    Args:
        out: a folder; made if need be.
        document: what `--json` prints.
        results: the sets of samples, at least one; pictures are of the first.
        reference: the real images.
        silos: names of the silos.
        value_range: of the images.

    Raises:
        OSError: the folder cannot be written.
    """
    shown = results[0]
    worst = {space: copies.worst[:SHOWN_PAIRS] for space, copies in shown.found.copies.items()}
    evenly = [n * reference.num // SHOWN for n in range(min(SHOWN, reference.num))]
    needed = {
        int(shown.found.copies[space].which_N[n])
        for space, numbers in worst.items()
        for n in numbers
    }
    real = reference.rows([*evenly, *needed])

    def pictures(images: Sequence[Tensor]) -> tuple[str, ...]:
        return inline(torch.stack(list(images)), value_range) if len(images) else ()

    sheets = [Sheet("reference", None, pictures([real[n] for n in dict.fromkeys(evenly)]))]
    sheets += _samples(shown, silos, pictures)
    pairs = {
        space: _pairs(shown, space, numbers, real, pictures) for space, numbers in worst.items()
    }
    page = render(
        "ddm",
        "evaluation.html.jinja",
        document=document,
        results=results,
        sheets=[sheet for sheet in sheets if sheet.pictures],
        pairs={space: each for space, each in pairs.items() if each},
        silos=silos,
        ratio=f"{shown.images.shape[-1]} / {shown.images.shape[-2]}",
        meanings=MEANINGS,
        limits=LIMITS,
        number=number,
        interval=interval,
        scale=_scale,
    )
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / PAGE, page.encode("utf-8"))
    write_atomic(out / FIGURES, (json.dumps(document, indent=2) + "\n").encode("utf-8"))


def _samples(shown: Shown, silos: Sequence[str], pictures: Any) -> list[Sheet]:
    """Return the first samples of each silo, or of all where silos are not known."""
    if shown.silo_N is None:
        return [Sheet("samples", None, pictures(list(shown.images[:SHOWN])))]
    numbers = [
        torch.nonzero(shown.silo_N == index).flatten()[:SHOWN] for index in range(len(silos))
    ]
    return [
        Sheet(silos[k], k, pictures(list(shown.images[each])))
        for k, each in enumerate(numbers)
        if len(each)
    ]


def _pairs(
    shown: Shown, space: str, numbers: Sequence[int], real: Mapping[int, Tensor], pictures: Any
) -> list[Pair]:
    copies = shown.found.copies[space]
    samples = pictures([shown.images[n] for n in numbers])
    nearest = pictures([real[int(copies.which_N[n])] for n in numbers])
    silo = [None if shown.silo_N is None else int(shown.silo_N[n]) for n in numbers]
    return [
        Pair(sample, other, silo[i], numbers[i], float(copies.ratio_N[numbers[i]]))
        for i, (sample, other) in enumerate(zip(samples, nearest, strict=True))
    ]


def _scale(results: Sequence[Shown], metric: str) -> Scale:
    """Return the scale of a metric's bars: over all its intervals and floors."""
    found = [each.found.metrics[metric] for each in results if metric in each.found.metrics]
    floors = [
        each.found.floor[0][metric].value
        for each in results
        if each.found.floor and metric in each.found.floor[0]
    ]
    return Scale.over([value for each in found for value in (each.low, each.high)] + floors)
