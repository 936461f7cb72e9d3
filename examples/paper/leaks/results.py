"""What is written of all experts: leaks.csv, leaks.png, README.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddm.evaluation.intervals import Estimate
from ddm.system.console import UNBROKEN, table
from examples.paper.leaks.cells import LEAKS, LeakCell, write_cells
from examples.paper.leaks.choices import CHOICES, HELD_OUT, MAX_AUC
from examples.paper.tables.results import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAYS = {
    "random": ("all weights, from random weights", "#c8553d"),
    "base": ("all weights, from the base", "#1b6ca8"),
    "lora": ("LoRA, from the base", "#2e8b57"),
}
_MARKERS = {
    "": ("all steps", "o"),
    "fifth": ("a fifth", "s"),
    "tenth": ("a tenth", "^"),
    "thirtieth": ("a thirtieth", "P"),
    "fortieth": ("a fortieth", "X"),
}
_PRIVATE_MARKERS = {"8": ("epsilon 8", "D"), "2": ("epsilon 2", "v")}


def write_report(
    out: Path,
    dataset: str,
    cells: Sequence[LeakCell],
    base: Mapping[str, Estimate],
    share: float,
) -> None:
    """Write everything that was measured by now."""
    order = list(CHOICES)
    cells = sorted(cells, key=lambda each: (each.images, order.index(each.choice), each.seed))
    write_cells(out / LEAKS, dataset, cells)
    _draw(out / "leaks.png", dataset, cells, base)
    head = (
        "images",
        "trained",
        "seed",
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
            cell.seed,
            cell.verdict,
            _shown(cell.figures["auc"]),
            _of_outsider(cell),
            *(_shown(cell.figures[name]) for name in ("tpr", "copies")),
            _shown(cell.figures["fid"], digits=1),
            _shown(cell.figures["kid"], digits=1),
        )
        for cell in cells
    ]
    page = [
        f"# What an expert remembers: {dataset}",
        "",
        _METHOD.format(held=HELD_OUT),
        "",
        f"    python -m examples.paper.leaks --dataset {dataset} --data PATH --out DIR",
        "",
        "`--images`, `--choices` and `--seeds` limited the runs: rows that are missing were not measured. "
        "`--published FOLDER --classifier FILE` goes on from earlier results, in the features of their classifier.",
        "",
        *([f"All trainings had {share:g} of their steps.", ""] if share != 1 else []),
        f"The base alone: FID {base['fid'].value:.1f}, KID {base['kid'].value:.4f}.",
        "",
        "```text",
        table(rows, head, width=UNBROKEN),
        "```",
        "",
        "![AUC of the strongest attack against FID, one panel for each number of images](leaks.png)",
        "",
    ]
    (out / "README.md").write_text("\n".join(page), "utf-8")


_METHOD = """One silo has images of some classes of the data set. The base learned public images of other classes, or of
some that the silo has too, but none of the silo's images. Each expert is audited by the worker's own code, with {held}
units held out. AUC and the share of members found are those of the strongest of the attacks that decide; near copies
are the larger share, by pixels or by features. The outsider trains shadows on other images of the silo's classes and
shares no code with the audit; its AUC is that of its best attack, and is missing if the data set has too few other
images. FID and KID use the features of a small classifier, against test images of the silo's classes. Brackets are 95%
intervals over units, samples and reference images; each row is one training. From random weights and for LoRA the
learning rate is 0.004, for all weights from the base 0.002. DP-SGD uses the same rates, which were best for a fifth of
the steps among 0.001 to 0.008, and 0.002 to 0.016 for LoRA, on validation images of Fashion-MNIST with another seed.
`leaks.csv` contains every figure, with times, commits and, where it was recorded, the sha256 of the classifier."""


def _of_outsider(cell: LeakCell) -> str:
    """Return the AUC of the outsider's attack; empty where there was none."""
    if "outsider_auc" not in cell.figures:
        return ""
    return f"{cell.figures['outsider_auc'].value:.3f}"


def _shown(figure: Figure, digits: int = 3) -> str:
    bounds = "" if figure.low is None else f" [{figure.low:.{digits}f}, {figure.high:.{digits}f}]"
    return f"{figure.value:.{digits}f}{bounds}"


def _draw(
    path: Path, dataset: str, cells: Sequence[LeakCell], base: Mapping[str, Estimate]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    from examples.paper.tables.figures import plain_ticks

    nums = sorted({cell.images for cell in cells})
    figure, axes = plt.subplots(
        1,
        len(nums),
        figsize=(1.5 + 3.2 * len(nums), 4.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for axis, num in zip(axes[0], nums, strict=True):
        for cell in cells:
            if cell.images == num:
                _draw_cell(axis, cell)
        axis.axvline(base["fid"].value, color="grey", lw=1, ls=":")
        axis.axhline(0.5, color="grey", lw=1, ls=":")
        axis.axhline(MAX_AUC, color="grey", lw=1)
        axis.set(title=f"{num:,} images", xlabel="FID", xscale="log")
        plain_ticks(axis.xaxis, (1, 2, 5), "{:g}".format)
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("AUC of the strongest attack")
    handles = [
        Line2D([], [], color=colour, marker="o", ls="", label=label)
        for label, colour in _WAYS.values()
    ]
    handles += [
        Line2D([], [], color="black", marker=marker, ls="", mfc="none", label=label)
        for label, marker in (_MARKERS | _PRIVATE_MARKERS).values()
    ]
    handles.append(Line2D([], [], color="grey", ls=":", label="the base alone; chance"))
    handles.append(Line2D([], [], color="grey", label="the plan's limit"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=5)
    figure.suptitle(f"What an expert remembers: {dataset}")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _draw_cell(axis: "Axes", cell: LeakCell) -> None:
    way, _, variant = cell.choice.partition("-")
    colour = _WAYS[way][1]
    # Private training has the marker of its epsilon, whatever its steps.
    marker = (_MARKERS | _PRIVATE_MARKERS)[variant.partition("-")[0]][1]
    fid = cell.figures["fid"].value
    auc = cell.figures["auc"]
    axis.plot(fid, auc.value, color=colour, marker=marker, ms=6)
    if auc.low is not None and auc.high is not None:
        axis.vlines(fid, auc.low, auc.high, color=colour, lw=0.8, alpha=0.6)
