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
    rows: tuple[tuple[str, Figure], ...]
    pairs: tuple[tuple[str, str, int], ...]
    suspects: tuple[int, ...]


def expert_leaks(site: Site, facts: ReviewFacts) -> tuple[ExpertLeaks, ...]:
    """Read what was found on each expert; nothing where there was no measurement."""
    if facts.audit is None:
        return ()
    work = open_workspace(site, facts.draft.plan_id)
    leaks = []
    for audit in facts.audit.experts[:MAX_EXPERTS]:
        pairs: tuple[tuple[str, str, int], ...] = ()
        suspects: tuple[int, ...] = ()
        # Pairs and suspects are kept beside the report, on this site alone.
        worst = read_worst(work.audit_folder(audit.expert_id))
        if worst is not None:
            document, thumbnails = worst
            samples = _pictures(thumbnails["samples"], facts)
            images = _pictures(thumbnails["images"], facts)
            pairs = tuple(zip(samples, images, document.pair_images, strict=False))
            suspects = document.suspects
        leaks.append(ExpertLeaks(audit, figure_rows(audit), pairs, suspects))
    return tuple(leaks)


def figure_rows(audit: ExpertAudit) -> tuple[tuple[str, Figure], ...]:
    """Return the figures that decide, the strongest attacks by themselves and the control, with names."""
    rows = [(f"AUC, {figure.name}", figure) for figure in audit.deciding_auc]
    rows += [
        (f"found at 1% false positives, {figure.name}", figure) for figure in audit.deciding_tpr
    ]
    for figure in audit.copies:
        rows.append((f"near copies in {figure.name}", figure))
    # Which attack is the strongest is known afterwards, so that these figures are a little too high.
    strongest = sorted(audit.auc, key=lambda figure: -figure.value)[:MAX_ATTACKS]
    rows += [(f"AUC by itself, {figure.name}", figure) for figure in strongest]
    if audit.control is not None:
        rows.append((f"AUC on the overfitted copy, {audit.control.name}", audit.control))
    return tuple(rows)


def _pictures(rows: Tensor, facts: ReviewFacts) -> tuple[str, ...]:
    """Turn thumbnails back into pictures; nothing of volumes."""
    # Thumbnails of `ddm.evaluation.copies`: at most so many pixels a side.
    channels, *sides = facts.plan.data.shape
    if len(sides) != 2:
        return ()
    shape = (channels, *(min(side, SIDE) for side in sides))
    return inline(rows.reshape(len(rows), *shape), facts.plan.data.range)
