"""The tables beside the figure: README.md, privacy.csv, targets.csv."""

import csv
import math
import platform
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ddm.system.console import UNBROKEN, table
from examples.paper.privacy.families import DELTA
from examples.paper.privacy.measure import TIMES
from examples.paper.privacy.results import FamilyRecord, Presets, SeedResult
from examples.paper.privacy.targets import PrivacyTarget, interval, reference_gain

ENCODERS = {
    "timm": "Public groups come from the features of a small timm network (test_resnet, images at 56 x 56). For each "
    "seed it is trained on the public images *and their classes*; it represents a network that was trained on similar "
    "public images. `counts, hog` uses principal components of oriented gradients, and `counts, pca` uses those of "
    "pixels; neither needs classes.",
    "pca": "Public groups come from principal components of the public images. Only the evaluation uses classes.",
}


METHOD = (
    "Routers are measured as an aggregator publishes them. Their temperature is fitted on separate public images, but "
    "the aggregator's fallback to counts is off. Learned routers spend three quarters of the total on counts and the "
    "rest on sketches. `samples` is trained on images drawn from experts without DP-SGD, and no target covers it. The "
    "reference is the better of two routers without privacy: a tuned network on x_t, trained on all private images, "
    "and exact counts over the same groups with a temperature of their own. `both` is a network that is trained "
    "together with exact counts. It shows what more could be gained, and is not part of the reference. The numbers of "
    "groups and dimensions and the encoder's training were chosen on the test images of the first split. Test images "
    "and their noise are the same for every seed of Fashion-MNIST, so intervals cover splits, encoders, clusters and "
    "statistics. A router that always answers the prior keeps the silos' shares. Therefore the shares within public "
    "clusters are compared as well, together with two routers that must fail this comparison."
)


def write_report(
    out: Path,
    dataset: str,
    presets: Presets,
    results: Sequence[SeedResult],
    targets: Sequence[PrivacyTarget],
    *,
    quick: bool,
) -> None:
    """Write everything that was measured."""
    _write_records(out / "privacy.csv", results)
    _write_targets(out / "targets.csv", targets)
    families = _families(results)
    head = (
        "family",
        "epsilon",
        "gain, nats",
        "of the reference's",
        "cross-entropy",
        "accuracy",
        "share error",
    )
    rows = [
        (
            target.figure,
            target.target,
            f"{target.value:.4f}" + _range(target),
            "met" if target.met else "MISSED",
            target.note,
        )
        for target in targets
    ]
    text = [
        f"# {'A QUICK RUN, WHOSE NUMBERS MEAN NOTHING. ' if quick else ''}Routers at a privacy budget: {dataset}",
        "![quality against epsilon](privacy.png)",
        _filled(
            f"`python -m examples.paper.privacy --dataset {dataset} --seeds {len(results)}` on {platform.machine()}, "
            f"{datetime.now(UTC):%Y-%m-%d}; seeds measured at commit {', '.join(sorted({r.commit for r in results}))}. "
            f"Means over t = {', '.join(f'{t:g}' for t in TIMES)}. Brackets: 95% interval over {len(results)} seeds; "
            "each seed has a new split of the data, new clusters and new noise. Epsilon is the total of a plan, per "
            f"image, replace-one, delta {DELTA:g}; the silos' own code draws the statistics."
        ),
        _filled(ENCODERS[presets.encoders[0]]),
        _filled(METHOD),
        "## Targets",
        _fenced(table(rows, ("figure", "to reach", "value", "", "note"), width=UNBROKEN)),
        "## Families",
        _fenced(table(families, head, width=UNBROKEN)),
        "## By t: cross-entropy, nats",
        _fenced(
            table(
                _by_time(results), ("family", "epsilon", *(f"{t:g}" for t in TIMES)), width=UNBROKEN
            )
        ),
        "## Settings",
        _fenced("\n".join(f"{name} = {value}" for name, value in presets.model_dump().items())),
    ]
    (out / "README.md").write_text("\n\n".join(text) + "\n", "utf-8")


def _groups(
    results: Sequence[SeedResult],
) -> dict[tuple[str, float | None], list[list[FamilyRecord]]]:
    """Return the records of each family and epsilon, one list a seed."""
    groups: dict[tuple[str, float | None], list[list[FamilyRecord]]] = {}
    for result in results:
        by_key: dict[tuple[str, float | None], list[FamilyRecord]] = {}
        for record in result.records:
            by_key.setdefault((record.family, record.epsilon), []).append(record)
        for key, records in by_key.items():
            groups.setdefault(key, []).append(records)
    return groups


def _families(results: Sequence[SeedResult]) -> list[tuple[str, ...]]:
    rows = []
    reference = float(np.mean([reference_gain(result) for result in results]))
    for (family, epsilon), by_seed in _groups(results).items():
        gain = interval(
            [float(np.mean([record.gain for record in records])) for records in by_seed]
        )
        means = [
            float(np.mean([getattr(record, field) for records in by_seed for record in records]))
            for field in ("loss_T", "accuracy_T", "share_error_T")
        ]
        spread = f" [{gain[1]:.4f}, {gain[2]:.4f}]" if math.isfinite(gain[1]) else ""
        share = f"{gain[0] / reference:.3f}"
        columns = (f"{mean:.4f}" for mean in means)
        rows.append((family, _epsilon(family, epsilon), f"{gain[0]:.4f}{spread}", share, *columns))
    return rows


def _by_time(results: Sequence[SeedResult]) -> list[tuple[str, ...]]:
    rows = []
    for (family, epsilon), by_seed in _groups(results).items():
        loss_T = np.mean([record.loss_T for records in by_seed for record in records], axis=0)
        rows.append((family, _epsilon(family, epsilon), *(f"{loss:.4f}" for loss in loss_T)))
    return rows


def _epsilon(family: str, epsilon: float | None) -> str:
    if epsilon is not None:
        return f"{epsilon:g}"
    return "infinite" if family == "samples" else "-"


def _range(target: PrivacyTarget) -> str:
    if target.low is None or target.high is None or not math.isfinite(target.low):
        return ""
    return f" [{target.low:.4f}, {target.high:.4f}]"


def _write_records(path: Path, results: Sequence[SeedResult]) -> None:
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(
            (
                "seed",
                "family",
                "epsilon",
                "draw",
                "note",
                "t",
                "cross_entropy",
                "accuracy",
                "share_error",
            )
        )
        for result in results:
            for record in result.records:
                for at, t in enumerate(TIMES):
                    values = (record.loss_T[at], record.accuracy_T[at], record.share_error_T[at])
                    key = (result.seed, record.family, record.epsilon, record.draw, record.note, t)
                    writer.writerow((*key, *(f"{value:.6f}" for value in values)))


def _write_targets(path: Path, targets: Sequence[PrivacyTarget]) -> None:
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(("figure", "target", "value", "low", "high", "met", "note"))
        for target in targets:
            writer.writerow(
                (
                    target.figure,
                    target.target,
                    target.value,
                    target.low,
                    target.high,
                    target.met,
                    target.note,
                )
            )


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
