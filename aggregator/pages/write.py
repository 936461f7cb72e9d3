"""Writes the pages of a release: `report.html` and the ensemble card, `README.md`.

Their facts come from the signed documents (`content`), their images from the ensemble (`drawing`), their layout from
the templates (`render`). Only this module writes files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aggregator.intake.inventory import Inventory
from aggregator.pages.content import ReportContent, limits, silo_parts
from aggregator.pages.render import render
from aggregator.router.report import RouterReport
from ddm.ensemble import Ensemble
from ddm.io.files import write_atomic
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.publishing.drawing import Drawing, Progress
from ddm.publishing.pictured import Pictured, draw_for

CARD_NAME = "README.md"
REPORT_NAME = "report.html"
PAGE_NAMES = (CARD_NAME, REPORT_NAME)


@dataclass(frozen=True)
class PageInput:
    """The sources of the pages.

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
        content: the sources of the pages.
        targets: the release's folder of files.
        on_progress: called, while images are drawn, with the batches done and the batches in all.
    """
    drawing = draw_for(content.plan, content.manifest, content.ensemble, on_progress)
    for name, page in pages(gather(content, drawing)).items():
        write_atomic(targets / name, page.encode("utf-8"))


def pages(content: ReportContent) -> Mapping[str, str]:
    """Fill the templates and return each page by its name."""
    values = {"content": content, "limits": limits(content.manifest), "root_file": "1.root.json"}
    values |= {"members": content.silos, "router": content.router}
    values |= content.pictured.values(content.manifest, content.plan)
    return {
        CARD_NAME: render("card.md.jinja", **values),
        REPORT_NAME: render("report.html.jinja", **values),
    }


def gather(page: PageInput, drawing: Drawing | None) -> ReportContent:
    """Gather the content of the pages."""
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
        pictured=Pictured.of(drawing, page.manifest, page.plan.data.range, "silo"),
    )
