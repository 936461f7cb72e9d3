"""Writes the pages of a release: `report.html` and the ensemble card, `README.md`.

Their facts come from the signed documents, their images from the ensemble, their layout from the templates of
`ddm/pages/templates`. A federation and one owner have the same pages; the templates leave out what one of them lacks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddm.io.files import write_atomic
from ddm.loading.ensemble import build_ensemble
from ddm.pages.render import render
from ddm.protocol.calibration import calibration_rows
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import REHEARSAL, Plan
from ddm.protocol.routers import SamplesSettings
from ddm.publishing.contents import ReleaseContents
from ddm.publishing.drawing import Drawing
from ddm.publishing.figures import ReportFigures, draw_for_report
from ddm.publishing.folder import ROOT_NAME
from ddm.publishing.members import (
    MAX_DETAILED,
    group_members,
    member_sections,
    remarks_on,
    shorten_names,
)
from ddm.statistics.of_plan import statistics_of
from ddm.system.progress import ProgressCallback

# The name under which sites that host models show a card.
CARD_NAME = "README.md"
REPORT_NAME = "report.html"
PAGE_NAMES = (CARD_NAME, REPORT_NAME)

# Experts that are small stay in memory; of large ones two are needed while one is exchanged for the next.
MIN_MEMORY_BYTES = 2 * 1024**3

# What readers of a release must know that it is not.
_NOT_PRIVATE = (
    "The experts' weights were trained without DP-SGD: they are not private and may memorise single images. Epsilon "
    "covers only the statistics from which the router was made."
)
_PRIVATE = (
    "The experts' weights were trained with DP-SGD. Their epsilon bounds what they tell about one unit; it says "
    "nothing about what many units have in common."
)
_NOTHING_PRIVATE = (
    "Neither the experts nor the router are differentially private; they may memorise single images. No leak audit was "
    "made."
)
_LIMITS = (
    "It is not a diagnostic device. Its images are synthetic and show no patient's findings.",
    "It cannot combine attributes that no {word} holds together: an image resembles the data of some {word}.",
    "A signature proves who published an expert, not that it is good.",
)

_ROUTER_SOURCES = {
    "experts": "images drawn from the experts (it is as private as their weights)",
    "group": "public images, weighed by differentially private counts",
    "class": "public images with classes, weighed by differentially private counts",
    "silo": "public images that name a silo",
}
_STATISTICS_SOURCE = "differentially private statistics"
_OWNER_SOURCE = "exact counts and images whose islands are known"


def memory_for(manifest: Manifest) -> int:
    """Return the bytes of memory that a release's experts may take here: enough for two, or for all small ones."""
    return max(MIN_MEMORY_BYTES, 2 * max(expert.file.bytes for expert in manifest.experts))


def write_pages(
    contents: ReleaseContents,
    manifest: Manifest,
    targets: Path,
    *,
    root_digest: str,
    device: torch.device | str = "cpu",
    on_progress: ProgressCallback | None = None,
) -> None:
    """Write the card and the report into `targets`; the same input gives the same bytes.

    Args:
        contents: what the release states.
        manifest: as it will be published, except that it does not list these pages yet.
        targets: the release's folder of files, which holds experts and router.
        root_digest: the fingerprint of the root of trust.
        device: where images are drawn.
        on_progress: called, while images are drawn, with the batches done and the batches in all.
    """
    memory_bytes = memory_for(manifest)
    ensemble = build_ensemble(
        contents.plan, manifest, targets, memory_bytes=memory_bytes, device=device
    )
    drawing = draw_for_report(contents.plan, manifest, ensemble, on_progress)
    for name, page in render_pages(contents, manifest, root_digest, drawing).items():
        write_atomic(targets / name, page.encode("utf-8"))


def render_pages(
    contents: ReleaseContents, manifest: Manifest, root_digest: str, drawing: Drawing | None
) -> Mapping[str, str]:
    """Return the text of each page, by its file name.

    Args:
        contents: what the release states.
        manifest: as it will be published, except that it does not list these pages yet.
        root_digest: the fingerprint of the root of trust.
        drawing: images that the ensemble drew; see `draw_for_report`.
    """
    plan = contents.plan
    word = contents.member_word
    figures = ReportFigures.of(drawing, manifest, plan.data.range, word)
    members = member_sections(contents, manifest)
    absent = _absent_members(manifest)
    admitted = [part.silo_id for part in members if part.published.admitted]
    # One owner's islands have few facts each, which stand in a table however many they are.
    has_many = len(members) > MAX_DETAILED and contents.division is None
    values: dict[str, Any] = {
        "contents": contents,
        "plan": plan,
        "rehearsal": REHEARSAL if plan.rehearsal else "",
        "manifest": manifest,
        "members": members,
        "has_many": has_many,
        "groups": group_members(members) if has_many else (),
        "remarks": remarks_on(members, absent) if has_many else (),
        "absent": absent,
        "absent_names": shorten_names([silo_id for silo_id, _ in absent]),
        "exposed": [part.silo_id for part in members if part.published.isolation == "none"],
        "admitted": admitted,
        "admitted_names": shorten_names(admitted),
        "num_units": sum(part.published.units for part in members),
        "statistics": statistics_of(plan.statistics),
        "router": contents.router,
        "router_source": _router_source(contents, manifest),
        "calibration": calibration_rows(contents.router.calibration),
        "division": contents.division,
        "publisher": "the federation's operator" if contents.division is None else "the owner",
        "limits": _limits(contents, manifest),
        "root_digest": root_digest,
        "root_file": ROOT_NAME,
        **figures.template_values(manifest, plan),
    }
    return {
        CARD_NAME: render("ddm", "card.md.jinja", **values),
        REPORT_NAME: render("ddm", "report.html.jinja", **values),
    }


def _absent_members(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the plan's silos that are not in the release, each with the reason."""
    missing = [(silo_id, "missing") for silo_id in manifest.missing_silos]
    withdrawn = [(silo_id, "withdrawn") for silo_id in manifest.withdrawn_silos]
    return sorted(missing + withdrawn)


def _router_source(contents: ReleaseContents, manifest: Manifest) -> str:
    """Return what the published router was made from."""
    plan: Plan = contents.plan
    if contents.division is not None:
        return _OWNER_SOURCE
    if manifest.router.kind == "samples" and isinstance(plan.router, SamplesSettings):
        return _ROUTER_SOURCES[plan.router.labels]
    return _STATISTICS_SOURCE


def _limits(contents: ReleaseContents, manifest: Manifest) -> tuple[str, ...]:
    """Return what readers of a release must know that it is not."""
    num_private = len(manifest.private_experts)
    if contents.division is not None:
        privacy = _NOTHING_PRIVATE
    elif num_private == 0:
        privacy = _NOT_PRIVATE
    elif num_private == len(manifest.experts):
        privacy = _PRIVATE
    else:
        privacy = (
            f"{manifest.weights_in_words}: the others are not private and may memorise "
            "single images."
        )
    return (privacy, *(limit.format(word=contents.member_word) for limit in _LIMITS))
