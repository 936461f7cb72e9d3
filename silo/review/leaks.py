"""What the leak audit found, for the page alone: the strongest attacks, and the nearest pairs as pictures."""

from dataclasses import dataclass

from torch import Tensor

from ddm.evaluation.copies import SIDE
from ddm.pages.pictures import inline
from silo.audit.document import ExpertAudit, Figure
from silo.audit.worst import read_worst
from silo.config import Site
from silo.plan.workspace import open_workspace
from silo.review.facts import ReviewFacts

MAX_EXPERTS = 8
MAX_ATTACKS = 5
_NamedFigure = tuple[str, Figure]
# A sample and an image, both as PNG in `data:` addresses, and the image's number.
_Pair = tuple[str, str, int]


@dataclass(frozen=True)
class ExpertLeaks:
    """One expert's audit as it is shown.

    Attributes:
        audit: the figures.
        rows: the figures that decide, the strongest attacks by themselves and the control, each with its name.
        pairs: a sample, the nearest learned image, both as PNG in `data:` addresses, and its number in the data.
        suspects: numbers of images of the units that attacks point at most.
    """

    audit: ExpertAudit
    rows: tuple[_NamedFigure, ...]
    pairs: tuple[_Pair, ...]
    suspects: tuple[int, ...]


def expert_leaks(site: Site, facts: ReviewFacts) -> tuple[ExpertLeaks, ...]:
    """Read what was found on each expert; nothing where there was no measurement."""
    if facts.audit is None:
        return ()
    work = open_workspace(site, facts.draft.plan_id)
    leaks = []
    for audit in facts.audit.experts[:MAX_EXPERTS]:
        pairs: tuple[_Pair, ...] = ()
        suspects: tuple[int, ...] = ()
        # Pairs and suspects are kept beside the report, on this site alone.
        worst = read_worst(work.audit_folder(audit.expert_id))
        if worst is not None:
            document, thumbnails = worst
            samples = _pictures(thumbnails["samples"], facts)
            images = _pictures(thumbnails["images"], facts)
            pairs = tuple(zip(samples, images, document.pair_images, strict=False))
            suspects = document.suspects
        leaks.append(
            ExpertLeaks(
                audit=audit,
                rows=figure_rows(audit),
                pairs=pairs,
                suspects=suspects,
            )
        )
    return tuple(leaks)


def figure_rows(audit: ExpertAudit) -> tuple[_NamedFigure, ...]:
    """Return the figures that decide, the strongest attacks by themselves and the control, with names."""
    rows: list[_NamedFigure] = []
    for figure in audit.deciding_auc:
        rows.append((f"AUC, {figure.name}", figure))
    for figure in audit.deciding_tpr:
        rows.append((f"found at 1% false positives, {figure.name}", figure))
    for figure in audit.copies:
        rows.append((f"near copies in {figure.name}", figure))
    # Which attack is the strongest is known afterwards, so that these figures are a little too high.
    strongest_first = sorted(audit.auc, key=lambda figure: -figure.value)
    for figure in strongest_first[:MAX_ATTACKS]:
        rows.append((f"AUC by itself, {figure.name}", figure))
    if audit.control is not None:
        rows.append((f"AUC on the overfitted copy, {audit.control.name}", audit.control))
    return tuple(rows)


def _pictures(rows: Tensor, facts: ReviewFacts) -> tuple[str, ...]:
    """Turn thumbnails back into pictures; nothing of volumes."""
    # Thumbnails of `ddm.evaluation.copies`: at most this many pixels a side.
    channels, *sides = facts.plan.data.shape
    if len(sides) != 2:
        return ()
    thumbnail_sides = [min(side, SIDE) for side in sides]
    thumbnails = rows.reshape(len(rows), channels, *thumbnail_sides)
    return inline(thumbnails, facts.plan.data.range)
