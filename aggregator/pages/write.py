"""The pages of a release that people read: `report.html` and the ensemble card, `README.md`.

What they say is gathered from the signed documents (`content`), what they show is drawn from the ensemble (`drawing`),
how it looks is in the templates of `aggregator.pages.render`. Only this file writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aggregator.intake.inventory import Inventory
from aggregator.pages.charts import HEIGHT, WIDTH, Scale
from aggregator.pages.content import (
    LIMITS,
    SHOWN_MIXED,
    ReportContent,
    posteriors,
    share_charts,
    sheets,
    silo_parts,
)
from aggregator.pages.drawing import Drawing, Progress, affordable, draw
from aggregator.pages.render import render
from aggregator.router.report import RouterReport
from ddm.ensemble import Ensemble
from ddm.io.files import write_atomic
from ddm.models import training_flops
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan

CARD_NAME = "README.md"
REPORT_NAME = "report.html"
PAGE_NAMES = (CARD_NAME, REPORT_NAME)


@dataclass(frozen=True)
class PageInput:
    """What the pages are made from.

    Attributes:
        plan: the plan.
        plan_digest: sha256 of its signed bytes.
        root_digest: the fingerprint of the root of trust.
        name: the federation's name.
        manifest: as it will be published, except that it does not list these pages yet.
        inventory: the accepted submissions.
        report: how the router was trained.
        ensemble: the experts and the router, in the manifest's order.
    """

    plan: Plan
    plan_digest: str
    root_digest: str
    name: str
    manifest: Manifest
    inventory: Inventory
    report: RouterReport
    ensemble: Ensemble


def write_pages(content: PageInput, targets: Path, on_progress: Progress | None = None) -> None:
    """Write the card and the report into `targets`; the same input gives the same bytes.

    Args:
        content: what the pages are made from.
        targets: the release's folder of files.
        on_progress: told, while images are drawn, what is done and how much there is in all.
    """
    for name, page in pages(gather(content, _draw(content, on_progress))).items():
        write_atomic(targets / name, page.encode("utf-8"))


def pages(content: ReportContent) -> Mapping[str, str]:
    """Fill the templates; return every page by its name."""
    values = {"content": content, "limits": LIMITS, "shown_mixed": SHOWN_MIXED}
    values |= {"Scale": Scale, "width": WIDTH, "height": HEIGHT}
    return {CARD_NAME: render("card.md.jinja", **values), REPORT_NAME: render("report.html.jinja", **values)}


def gather(page: PageInput, drawing: Drawing | None) -> ReportContent:
    """Bring together what the pages say."""
    submissions = {silo_id: silo.submission for silo_id, silo in page.inventory.silos.items()}
    silos = silo_parts(page.manifest, submissions)
    return ReportContent(
        name=page.name,
        plan=page.plan,
        plan_digest=page.plan_digest,
        root_digest=page.root_digest,
        manifest=page.manifest,
        silos=silos,
        router=page.report,
        drawing=drawing,
        sheets=sheets(drawing, silos, page.plan.data.range) if drawing else (),
        posteriors=posteriors(drawing) if drawing else (),
        shares=share_charts(drawing, silos) if drawing else (),
    )


def _draw(page: PageInput, on_progress: Progress | None) -> Drawing | None:
    order = {silo.silo_id: index for index, silo in enumerate(page.manifest.silos)}
    silo_E = [order[expert.silo_id] for expert in page.manifest.experts]
    flops = training_flops(page.plan.expert.architecture, page.plan.expert_shape, 1, page.plan.condition) / 3
    effort = affordable(flops, len(order), len(silo_E))
    return draw(page.ensemble, silo_E, effort, on_progress=on_progress) if effort else None
