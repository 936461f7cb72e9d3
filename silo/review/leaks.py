"""What the leak audit found, for the page alone: the strongest attacks, and the nearest pairs as pictures."""

from dataclasses import dataclass

from torch import Tensor

from ddm.evaluation.copies import SIDE
from ddm.pages.pictures import inline
from silo.audit.document import ExpertAudit, Figure
from silo.audit.worst import read_worst
from silo.config import Site
from silo.plan.workspace import open_workspace
from silo.review.facts import Facts

MOST_EXPERTS, MOST_ATTACKS = 8, 5


@dataclass(frozen=True)
class ExpertLeaks:
    """One expert's audit as it is shown.

    Attributes:
        audit: the figures.
        rows: the strongest attacks, near copies and the control, each with its name.
        pairs: a sample, the nearest learned image, both as PNG in `data:` addresses, and its number in the data.
        suspects: numbers of images of the units that attacks point at most.
    """

    audit: ExpertAudit
    rows: tuple[tuple[str, Figure], ...]
    pairs: tuple[tuple[str, str, int], ...]
    suspects: tuple[int, ...]


def expert_leaks(site: Site, facts: Facts) -> tuple[ExpertLeaks, ...]:
    """Read what was found on each expert; nothing where there was no measurement."""
    if facts.audit is None:
        return ()
    work, found = open_workspace(site, facts.draft.plan_id), []
    for audit in facts.audit.experts[:MOST_EXPERTS]:
        worst = read_worst(work.audit_folder(audit.expert_id))
        pairs: tuple[tuple[str, str, int], ...] = ()
        if worst:
            samples, images = (_pictures(worst[1][name], facts) for name in ("samples", "images"))
            pairs = tuple(zip(samples, images, worst[0].pair_images, strict=False))
        found.append(
            ExpertLeaks(audit, figure_rows(audit), pairs, worst[0].suspects if worst else ())
        )
    return tuple(found)


def figure_rows(audit: ExpertAudit) -> tuple[tuple[str, Figure], ...]:
    """Return the strongest attacks by AUC, the sharpest one, the shares of near copies and the control, with names."""
    strongest = sorted(audit.auc, key=lambda each: -each.value)[:MOST_ATTACKS]
    rows = [(f"AUC, {each.name}", each) for each in strongest]
    rows += [(f"found at 1% false positives, {each.name}", each) for each in _largest(audit.tpr)]
    rows += [(f"near copies in {each.name}", each) for each in audit.copies]
    return (
        *rows,
        *(
            [(f"AUC on the overfitted copy, {audit.control.name}", audit.control)]
            if audit.control
            else []
        ),
    )


def _largest(figures: tuple[Figure, ...]) -> list[Figure]:
    return [max(figures, key=lambda each: each.value)] if figures else []


def _pictures(rows: Tensor, facts: Facts) -> tuple[str, ...]:
    """Turn thumbnails back into pictures; nothing of volumes."""
    channels, *sides = facts.plan.data.shape
    if len(sides) != 2:
        return ()
    shape = (channels, *(min(side, SIDE) for side in sides))
    return inline(rows.reshape(len(rows), *shape), facts.plan.data.range)
