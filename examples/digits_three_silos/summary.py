"""The demo's table: what left each silo, how the router did on public images, and how long each stage took."""

import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake.inventory import Inventory, take_inventory
from ddm.system.console import human_bytes, table
from silo.audit.document import read_report
from silo.config import AUDIT_REPORT, Site

SILOS = ("north", "east", "west")


def summarise(out: Path, silos: Sequence[str]) -> dict[str, object]:
    """Gather what left each silo."""
    inventory = take_inventory(Federation(out / "fed"))
    return {
        "silos": {silo: _left(out, inventory, silo) for silo in silos if silo in inventory.silos}
    }


def write_summary(summary: dict[str, object], out: Path) -> None:
    """Write summary.json and print the tables."""
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print()
    print(_text(summary))
    print(
        f"\nA grid of samples: {out / 'samples.png'}\nAll of this as JSON: {out / 'summary.json'}"
    )


def _left(out: Path, inventory: Inventory, silo: str) -> dict[str, object]:
    submission = inventory.silos[silo].submission
    sent = [
        path
        for path in (out / silo / "outbox" / inventory.plan.plan_id).rglob("*")
        if path.is_file()
    ]
    return {
        "images": submission.num_units,
        "epsilon": submission.spent.epsilon,
        "delta": submission.spent.delta,
        "bytes_left": sum(path.stat().st_size for path in sent),
        "audit": submission.audit.verdict,
        "audit_found": _found(Site(out / silo), inventory.plan.plan_id),
        "isolation": submission.isolation,
        "approval": submission.approval.kind if submission.approval else None,
    }


def _found(site: Site, plan_id: str) -> str:
    """Return the verdict of the site's own audit and its reason; of one that holds nothing out, how many would do."""
    report = read_report(site.work_folder(plan_id) / AUDIT_REPORT)
    terms = site.policy().audit
    verdict = f"{report.verdict}: {report.reason}"
    if report.num_holdout_units == 0:
        enough = ceil(terms.min_holdout_units / terms.max_holdout_share)
        verdict += f"; a site holds out as many from {enough:,} images on"
    return verdict


def _text(summary: dict[str, object]) -> str:
    parts = []
    silos: dict[str, dict[str, object]] = summary["silos"]  # type: ignore[assignment]
    rows = [
        (
            silo,
            row["images"],
            f"{row['epsilon']:g}",
            human_bytes(float(str(row["bytes_left"]))),
            row["audit"],
            row["approval"],
        )
        for silo, row in silos.items()
    ]
    parts.append(
        "What left each silo\n"
        + table(rows, ("silo", "images", "epsilon", "bytes left", "audit", "approved by"))
    )

    verdicts = [(silo, row["audit_found"]) for silo, row in silos.items()]
    parts.append(
        "What the leak audit found, which stays at each site\n"
        + table(verdicts, ("silo", "verdict"))
    )

    seconds: dict[str, float] = summary["seconds"]  # type: ignore[assignment]
    parts.append(
        "Seconds\n"
        + table([(name, f"{value:.1f}") for name, value in seconds.items()], ("stage", "s"))
    )
    return "\n\n".join(parts)
