"""The card of a release of islands, `README.md`: what it holds, how it was made, what it does not promise."""

import re
from collections.abc import Sequence

from ddm.islands.folder import Split
from ddm.islands.router import OwnersRouter
from ddm.protocol.calibration import calibration_rows
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan

CARD_NAME = "README.md"
_MARKUP = re.compile(r"[\\`*_{}\[\]#|~!$@^<>&]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_WAYS = {
    "clusters": "The data set was divided by clusters of features: {fine} fine centroids, joined to {num} islands.",
    "random": "The data set was divided at random into {num} islands, the control for clusters.",
    "column": "The data set was divided into {num} islands by the values of the column {column}.",
}


def division(split: Split, plan: Plan) -> str:
    """Return how the data set was divided, in a sentence of plain text."""
    return _WAYS[split.by].format(
        fine=plan.clustering.num_fine, num=len(split.islands), column=split.column or ""
    )


def absent(manifest: Manifest) -> str | None:
    """Return what a release without some islands must say, in a sentence; None for a whole one."""
    if not manifest.missing_silos:
        return None
    names = ", ".join(manifest.missing_silos)
    return (
        f"Without {names}: no expert of these islands was trained yet; shares are among the others."
    )


def card(
    split: Split, plan: Plan, manifest: Manifest, router: OwnersRouter, root_digest: str
) -> str:
    """Return the card's text.

    Args:
        split: how the data set was divided.
        plan: the plan.
        manifest: as it will be published, except that it does not list this card yet.
        router: how the router did.
        root_digest: the fingerprint of the root of trust.
    """
    shape = " x ".join(map(str, plan.data.shape))
    (value, low, high), without = router.minus_prior, absent(manifest)
    lines = [
        f"# {_text(split.name)}, version {manifest.version}",
        "",
        f"An ensemble of {len(manifest.experts)} diffusion experts of the kind {plan.expert.architecture.kind}, which",
        f"together sample images of {shape} values as one model (Decentralized Diffusion Models). One owner had all of",
        "the data; each expert was trained on one island of it, alone.",
        "",
        *([f"Each picture: {'; '.join(plan.transform.words)}.", ""] if plan.transform else []),
        f"{_text(division(split, plan))} The router ({router.kind}) was trained on",
        f"images whose islands are known. On images held out its cross-entropy is {value:+.4f} nats against predicting",
        f"the shares alone (95% interval {low:+.4f} to {high:+.4f}).",
        "",
        *([f"**{_text(without)}**", ""] if without else []),
        *_islands(split, manifest),
        "",
        "Expected calibration error of the router on images held out, in bands of the noise level t (0 is data), with",
        f"95% intervals; the published temperature is {manifest.router.temperature:.3g}:",
        "",
        "| noise level | as published | at temperature 1 |",
        "| --- | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in calibration_rows(router.calibration.errors)),
        "",
        "`report.html` beside this file shows samples, the router and every figure.",
        "",
        "## Open",
        "",
        f"The root of trust has the sha256 `{root_digest}`. Get it and the file `root.json` from the owner.",
        "",
        "```console",
        "$ ddm verify release --root root.json",
        "$ ddm sample release --root root.json --num 64 --out samples.png",
        "```",
        "",
        "## Limits",
        "",
        "- Neither the experts nor the router are differentially private; they may memorise single images. No leak",
        "  audit was made.",
        "- Images are synthetic. An ensemble is not a diagnostic device.",
        "- A signature proves who published an expert, not that it is good.",
        "",
        f"Licence: {_text(manifest.licence)}. Cite as: {_text(manifest.cite)}",
    ]
    return "\n".join(lines) + "\n"


def _islands(split: Split, manifest: Manifest) -> Sequence[str]:
    named = {island.island_id: island for island in split.islands}
    head = ["| island | images | share |", "| --- | ---: | ---: |"]
    if split.column:
        head = [
            f"| island | {_text(split.column)} | images | share |",
            "| --- | --- | ---: | ---: |",
        ]
    rows = []
    for expert in manifest.experts:
        island = named[expert.silo_id]
        value = f" {_text(island.value or '')} |" if split.column else ""
        rows.append(f"| {island.island_id} |{value} {island.num_images} | {expert.prior:.3f} |")
    return [*head, *rows]


def _text(value: str) -> str:
    """Escape free text for Markdown: one line, no markup."""
    return _MARKUP.sub(r"\\\g<0>", _CONTROL.sub(" ", value).strip())
