"""The report of a scan for the site's terminal: counts alone; the names of bad files stand in a private list."""

from collections import Counter
from pathlib import Path

from ddm.images.reasons import Flag
from ddm.system.console import table
from silo.images.alike import MOST_BITS
from silo.images.decisions import LEFT_OUT
from silo.images.scan import QUARANTINE
from silo.images.summary import Summary

_MOST_ROWS = 12


def report(summary: Summary, folder: Path, *, of_site: bool) -> str:
    """Return the lines of a report.

    Args:
        summary: of the scan.
        folder: its private folder.
        of_site: whether the images are those of a site, whose worker reads them as its configuration says.
    """
    parts = [
        f"{summary.accepted} images accepted, {summary.quarantined} in quarantine. "
        f"{summary.decoded} files were decoded now, {summary.read - summary.decoded} others read and found unchanged."
    ]
    if summary.quarantined:
        rows = [(num, reason, _to_do(reason, of_site)) for reason, num in summary.reasons.most_common()]
        parts.append(table(rows, ("images", "quarantined because", "what to do")))
        parts.append(f"Their names, for this site alone: {folder / QUARANTINE}")
    if summary.accepted:
        parts += _accepted(summary)
    return "\n\n".join(parts)


def _accepted(summary: Summary) -> list[str]:
    parts = [_counts(summary.shapes, "size")]
    rows = [
        (kind, each.num, f"{each.low:g}", f"{each.high:g}", f"{each.total / each.num:.4g}")
        for kind, each in sorted(summary.intensities.items())
    ]
    parts.append(table(rows, ("values", "images", "lowest", "highest", "mean")))
    if summary.labels:
        parts.append(_counts(summary.labels, "label"))
    if summary.splits:
        parts.append(_counts(summary.splits, "split"))
    near = summary.near_duplicates()
    parts.append(
        f"Patients: {summary.patients}. Duplicates: {summary.duplicates} exact, at least {near} near "
        f"(difference hash, at most {MOST_BITS} of 256 bits apart; images of 32 x 34 pixels and more)."
    )
    if remarks := summary.remarks():
        parts.append("\n".join(f"- {remark}" for remark in remarks))
    return parts


def _counts(counts: Counter[str], name: str) -> str:
    rows = [(key, num) for key, num in counts.most_common(_MOST_ROWS)]
    if more := len(counts) - len(rows):
        rows.append((f"{more} more", sum(counts.values()) - sum(num for _, num in rows)))
    return table(rows, (name, "images"))


def _to_do(reason: str, of_site: bool) -> str:
    if reason in {flag.value for flag in Flag}:
        return "a person looks at it: silo review --images"
    remedies = _REMEDIES | (_OF_A_SITE if of_site else {})
    return remedies.get(reason, "export it again, or leave it out")


_REMEDIES = {
    LEFT_OUT: "nothing; silo review --images can undo it",
    "no such file": "mend the table",
    "named twice in the table": "keep one row",
    "link to a folder": "name the folder itself",
    "not a regular file": "leave it out",
    "cannot be read": "let this user read it, and scan again",
    "not an image": "leave it out",
    "archive": "unpack it",
    "measurements, not a picture": "leave it out",
    "unsupported encoding": "convert it",
    "unsupported shape": "convert it",
    "too large": "shrink or divide it",
    "too much memory": "give more with --memory",
    "too much time": "give more with --seconds",
    "decoder crashed": "leave it out: it may be hostile",
}
_OF_A_SITE = {
    "too much memory": "raise images.memory_mib in silo.toml",
    "too much time": "raise images.seconds in silo.toml",
}
