"""The report of a scan on the site's terminal: counts alone; the names of bad files are in a private list."""

from collections import Counter
from pathlib import Path

from ddm.images.reasons import Flag
from ddm.system.console import table
from silo.images.alike import MAX_DIFFERENT_BITS
from silo.images.decisions import LEFT_OUT
from silo.images.scan import QUARANTINE
from silo.images.summary import Summary, counted

_MAX_ROWS = 12


def report(
    summary: Summary,
    folder: Path,
    *,
    of_site: bool,
    review_command: str,
) -> str:
    """Return the lines of a report.

    Args:
        summary: the summary of the scan.
        folder: private, of the scan.
        of_site: whether the images are those of a site, whose worker reads them as its configuration says.
        review_command: what to type to look at the images that wait for a person.
    """
    accepted = counted(summary.accepted, "image")
    paragraphs = [
        f"{accepted} accepted, {summary.quarantined} in quarantine. {_work_text(summary)}"
    ]
    if summary.quarantined:
        rows = []
        for reason, num in summary.reasons.most_common():
            rows.append((num, reason, _what_to_do(reason, of_site)))
        paragraphs.append(table(rows, ("images", "quarantined because", "what to do")))
        lines = [f"Their names, only for this site: {folder / QUARANTINE}"]
        if not _DECIDED_BY_A_PERSON.isdisjoint(summary.reasons):
            lines.append(f"To look at images and decide: {review_command}")
        paragraphs.append("\n".join(lines))
    if summary.other_parts:
        paragraphs.append(unused_parts_text(summary.other_parts))
    if summary.accepted:
        paragraphs += _accepted(summary)
    remarks = summary.remarks()
    if remarks:
        paragraphs.append("\n".join(f"- {remark}" for remark in remarks))
    return "\n\n".join(paragraphs)


def _work_text(summary: Summary) -> str:
    """Return the sentence about how many files this scan opened."""
    verb = "was" if summary.num_decoded == 1 else "were"
    sentence = f"{counted(summary.num_decoded, 'file')} {verb} decoded now"
    num_unchanged = summary.num_read - summary.num_decoded
    if num_unchanged:
        return f"{sentence}, {counted(num_unchanged, 'other')} unchanged."
    if summary.num_decoded or not summary.accepted:
        return f"{sentence}."
    return f"{sentence}: nothing changed since the last scan."


def unused_parts_text(counts: Counter[str]) -> str:
    """Return the sentence about parts of the data set that are not used, such as its test part."""
    numbers = ", ".join(f"{num} of part {part}" for part, num in counts.most_common())
    return (
        f"Not used: {numbers}. Images of these parts are neither trained on nor counted on the card; "
        "to change this, set parts under [data] in policy.toml."
    )


def _accepted(summary: Summary) -> list[str]:
    paragraphs = [_counts(summary.shapes, "size")]
    rows = []
    for kind, values in sorted(summary.intensities.items()):
        mean = values.total_of_means / values.num
        low = f"{values.low:g}"
        high = f"{values.high:g}"
        rows.append((kind, values.num, low, high, f"{mean:.4g}"))
    heads = ("values", "images", "lowest", "highest", "mean")
    paragraphs.append(table(rows, heads))
    if summary.labels:
        paragraphs.append(_counts(summary.labels, "label"))
    if summary.parts:
        paragraphs.append(_counts(summary.parts, "part"))
    paragraphs.append(
        f"Patients: {summary.patients}. "
        f"Duplicates: {summary.duplicates} exact, at least {summary.near_duplicates()} near (difference hash, at most "
        f"{MAX_DIFFERENT_BITS} of 256 bits apart; images of 32 x 34 pixels and more)."
    )
    return paragraphs


def _counts(counts: Counter[str], name: str) -> str:
    rows = list(counts.most_common(_MAX_ROWS))
    num_more = len(counts) - len(rows)
    if num_more:
        num_images = counts.total() - sum(num for _, num in rows)
        rows.append((f"{num_more} more", num_images))
    return table(rows, (name, "images"))


def _what_to_do(reason: str, of_site: bool) -> str:
    if reason in _FLAGS:
        return "look at the images, see below"
    if of_site and reason in _REMEDIES_OF_A_SITE:
        return _REMEDIES_OF_A_SITE[reason]
    return _REMEDIES.get(reason, "export it again, or leave it out")


_FLAGS = frozenset(flag.value for flag in Flag)
_DECIDED_BY_A_PERSON = _FLAGS | {LEFT_OUT}
# By the words of `ddm.images.reasons.Reason`, which the summary counts.
_REMEDIES = {
    LEFT_OUT: "nothing; to undo it, see below",
    "no such file": "correct the table",
    "named twice in the table": "keep one row",
    "link to a folder": "name the folder itself",
    "not a regular file": "leave it out",
    "outside of the data folder": "copy it into the folder of the data or of the table, or allow it with --outside",
    "other file, skipped": "nothing",
    "cannot be read": "give this user permission to read it, and scan again",
    "changed during the scan": "scan again",
    "not an image": "leave it out",
    "archive": "unpack it",
    "measurements, not a picture": "leave it out",
    "unsupported encoding": "convert it",
    "ambiguous": "rename it or save it so that it has one meaning",
    "unsupported shape": "convert it",
    "too large": "reduce or split it",
    "too much memory": "raise the limit with --memory",
    "too much time": "raise the limit with --seconds",
    "decoder crashed": "leave it out: it may be hostile",
}
_REMEDIES_OF_A_SITE = {
    "outside of the data folder": "copy it into the folder, or allow it: --outside for a new site or one scan, "
    "outside = true under [images] in silo.toml for good",
    "too much memory": "raise images.memory_mib in silo.toml",
    "too much time": "raise images.seconds in silo.toml",
}
