"""What was measured, and what is written of it: leaks.csv, leaks.png, README.md."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddm.evaluation.intervals import Estimate
from ddm.protocol.base import Model
from ddm.system.console import UNBROKEN, table
from examples.paper.leaks.choices import CHOICES, HELD_OUT
from examples.paper.tables.results import Figure

_SHOWN = ("auc", "tpr", "copies", "fid", "kid")
_OF_OUTSIDER = ("outsider_auc", "outsider_tpr")
_COLOURS = {
    "whole": "#c8553d",
    "fewer": "#e0a458",
    "lora": "#1b6ca8",
    "lora-8": "#2e8b57",
    "lora-2": "#7b5ea7",
}


class LeakCell(Model):
    """One silo's expert, measured.

    Attributes:
        choice: a name of `CHOICES`.
        images: that it learned.
        steps: of training.
        verdict: of the audit.
        reason: for it.
        figures: `auc` and `tpr` (at 1% false positives) of the audit's strongest attack, `outsider_auc` and
            `outsider_tpr` of an outsider's where one attacked, `copies` (the larger share of near
            copies, by pixels or features), `fid` and `kid`.
        noise_multiplier: of private training.
        training_s: seconds of training.
        audit_s: seconds of the audit.
        commit: of the code.
        hardware: in words.
        utc: when it was measured.
    """

    choice: str
    images: int
    steps: int
    verdict: str
    reason: str
    figures: dict[str, Figure]
    noise_multiplier: float | None
    training_s: float
    audit_s: float
    commit: str
    hardware: str
    utc: str


def write_report(
    out: Path,
    dataset: str,
    cells: Sequence[LeakCell],
    base: Mapping[str, Estimate],
    command: str,
    share: float,
) -> None:
    """Write everything that was measured by now."""
    with (out / "leaks.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        bounds = [f"{name}{end}" for name in _SHOWN for end in ("", "_low", "_high")]
        last = ("noise_multiplier", "training_s", "audit_s", "commit", "hardware", "utc")
        figures = [*bounds, *_OF_OUTSIDER]
        writer.writerow(["dataset", "choice", "images", "steps", "verdict", *figures, *last])
        for cell in cells:
            figures_of_cell = [cell.figures[name] for name in _SHOWN]
            values = [
                _number(value)
                for figure in figures_of_cell
                for value in (figure.value, figure.low, figure.high)
            ]
            values += [_value_of_outsider(cell, name) for name in _OF_OUTSIDER]
            ends = [_number(cell.noise_multiplier), f"{cell.training_s:.1f}", f"{cell.audit_s:.1f}"]
            provenance = [cell.commit, cell.hardware, cell.utc]
            writer.writerow(
                [
                    dataset,
                    cell.choice,
                    cell.images,
                    cell.steps,
                    cell.verdict,
                    *values,
                    *ends,
                    *provenance,
                ]
            )
    _draw(out / "leaks.png", dataset, cells, base)
    head = (
        "images",
        "trained by",
        "verdict",
        "AUC",
        "outsider's AUC",
        "found at 1% false",
        "near copies",
        "FID",
        "KID",
    )
    rows = [
        (
            f"{cell.images:,}",
            CHOICES[cell.choice].label,
            cell.verdict,
            _shown(cell.figures["auc"]),
            _value_of_outsider(cell, "outsider_auc")[:5],
            *(_shown(cell.figures[name]) for name in ("tpr", "copies")),
            _shown(cell.figures["fid"], digits=1),
            _shown(cell.figures["kid"], digits=1),
        )
        for cell in sorted(cells, key=lambda each: (each.images, list(CHOICES).index(each.choice)))
    ]
    page = [
        f"# What an expert remembers: {dataset}",
        "",
        _METHOD.format(held=HELD_OUT),
        "",
        f"    {command}",
        "",
        *([f"All trainings had {share:g} of their steps.", ""] if share != 1 else []),
        f"The public expert alone: FID {base['fid'].value:.1f}, KID {base['kid'].value:.4f}.",
        "",
        "```text",
        table(rows, head, width=UNBROKEN),
        "```",
        "",
        "![AUC of the strongest attack, share of near copies and FID against images](leaks.png)",
        "",
    ]
    (out / "README.md").write_text("\n".join(page), "utf-8")


_METHOD = """One silo trains on some classes of the data set. The public expert, from which LoRA starts, was trained on
the other classes. Each expert is audited by the worker's own code, with {held} units held out. AUC and the share of
members found are those of the strongest attack; near copies are the larger share, by pixels or by features. The
outsider trains shadows on other images of these classes and shares no code with the audit; its AUC is that of its best
attack. FID and KID use the features of a small classifier, against test images of the silo's classes. Brackets are 95%
intervals over units, samples and reference images; each row is one training. `leaks.csv` contains every figure, with
times and commits."""


def _value_of_outsider(cell: LeakCell, name: str) -> str:
    """Return a figure of the outsider's attack; empty where there was none."""
    if name not in cell.figures:
        return ""
    return f"{cell.figures[name].value:.6f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _shown(figure: Figure, digits: int = 3) -> str:
    bounds = "" if figure.low is None else f" [{figure.low:.{digits}f}, {figure.high:.{digits}f}]"
    return f"{figure.value:.{digits}f}{bounds}"


def _draw(
    path: Path, dataset: str, cells: Sequence[LeakCell], base: Mapping[str, Estimate]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), constrained_layout=True)
    for axis, (name, label) in zip(
        axes,
        (("auc", "AUC of the strongest attack"), ("copies", "near copies"), ("fid", "FID")),
        strict=True,
    ):
        for choice, colour in _COLOURS.items():
            chosen_cells = sorted(
                (cell for cell in cells if cell.choice == choice), key=lambda each: each.images
            )
            if chosen_cells:
                values = [cell.figures[name] for cell in chosen_cells]
                low = [
                    max(figure.value - (figure.value if figure.low is None else figure.low), 0)
                    for figure in values
                ]
                high = [
                    max((figure.value if figure.high is None else figure.high) - figure.value, 0)
                    for figure in values
                ]
                axis.errorbar(
                    [cell.images for cell in chosen_cells],
                    [figure.value for figure in values],
                    yerr=[low, high],
                    color=colour,
                    label=CHOICES[choice].label,
                    marker="o",
                    ms=4,
                    capsize=2.5,
                )
        axis.set(xlabel="images of the silo", ylabel=label, xscale="log")
        axis.grid(alpha=0.25)
    axes[0].axhline(0.5, color="grey", lw=1, ls=":")
    axes[2].axhline(base["fid"].value, color="grey", lw=1, ls=":", label="the public expert")
    handles, labels = axes[2].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3)
    figure.suptitle(f"What an expert remembers: {dataset}")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
