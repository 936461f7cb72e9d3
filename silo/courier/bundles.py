"""Takes a plan's bundle into the inbox: its metadata first, and the rest only once they verify from the pinned root.

Before a byte of a plan's files is stored, the chain of signatures from the root to their digests has verified, and the
index names exactly the signed files. What verified and is complete takes the place of an earlier bundle of that plan.
The attack is to fill the disk of a site, or to hide the plan among false ones, with the node's channel alone.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddm.errors import (
    BusyError,
    DigestError,
    DocumentError,
    FormatError,
    PolicyError,
    ReplayError,
    TrustError,
)
from ddm.io.files import move_into_place
from ddm.io.locks import lock_if_unread, locked
from ddm.io.modes import group_folder, open_to_group
from ddm.protocol.base import sha256_hex
from ddm.transport.messages import MAX_BUNDLE_FILES, BundleProgress, IndexEntry, Offer
from ddm.transport.shards import PartFolder, list_folder
from ddm.trust.rules import SignedFile
from ddm.trust.verify import verify_bundle_metadata
from silo.courier.inbox import MAX_METADATA_BYTES, Inbox, has_verified, remove

_METADATA = re.compile(r"metadata/[\w.-]{1,100}\.json", re.ASCII)
# What a bundle has beside its files: folders and marks of our own, with some to spare.
_NUM_OWN_FOLDERS = 8


def take_bundle(
    offer: Offer, pieces: Sequence[memoryview], inbox: Inbox, *, bundle_bytes: int, shard_bytes: int
) -> BundleProgress:
    """Store what verifies of the received bytes, and report what is missing.

    Args:
        offer: the bundle's index, and the ranges that came along.
        pieces: their bytes.
        inbox: where they go.
        bundle_bytes: most bytes of one bundle.
        shard_bytes: longest range to ask for.

    Raises:
        PolicyError: the bundle is larger than this site takes, or than its inbox has room for.
        DocumentError: the index does not describe a bundle.
        TrustError: the root's keys have not signed these metadata, or not for these files, or signed newer ones since.
        BusyError: the worker is reading an earlier bundle of this plan.
    """
    files = tuple(sorted(offer.files, key=lambda entry: entry.path))
    _check_index(files, offer.plan_id, bundle_bytes)
    with locked(inbox.site / "courier", "inbox"):
        inbox.tidy()
        bundle = inbox.folder / offer.plan_id / "bundle"
        # The aggregator offers again after a restart of either side; what is here whole is not sent twice.
        if bundle.exists() and _list_bundle(bundle, bundle_bytes) == files:
            return BundleProgress(complete=True)
        return _collect(offer, files, pieces, inbox, shard_bytes)


def _collect(
    offer: Offer,
    files: tuple[IndexEntry, ...],
    pieces: Sequence[memoryview],
    inbox: Inbox,
    shard_bytes: int,
) -> BundleProgress:
    """Store the metadata until they are whole and verify; only then the files that they sign."""
    home = inbox.folder / offer.plan_id
    metadata_ranges = []
    other_ranges = []
    for span, data in zip(offer.spans, pieces, strict=True):
        if _is_metadata(span.path):
            metadata_ranges.append((span, data))
        else:
            other_ranges.append((span, data))
    # Each index has a part of its own: what a stranger offers under a plan's name takes nothing from the plan.
    encoded_index = "".join(entry.model_dump_json() for entry in files).encode()
    target = home / sha256_hex(encoded_index)[:16]
    own_part = target.with_name(f"{target.name}.part")
    if not own_part.exists():
        metadata_bytes = sum(entry.num_bytes for entry in files if _is_metadata(entry.path))
        num_entries = len(files) + _NUM_OWN_FOLDERS
        inbox.make_room(metadata_bytes, num_entries, own_part, signed=False)
        group_folder(home, inbox.folder)
    part = PartFolder(target, files)
    try:
        part.write(metadata_ranges)
        missing = part.missing(shard_bytes)
        missing_metadata = tuple(span for span in missing if _is_metadata(span.path))
        if missing_metadata:
            return BundleProgress(missing=missing_metadata)

        signed = verify_bundle_metadata(own_part, inbox.root(), state=inbox.versions)
        if signed.plan_id != offer.plan_id:
            # Genuine metadata of another plan would take the place of this plan's bundle, and the worker would refuse
            # them.
            raise ReplayError(
                "bundle", expected=f"plan {offer.plan_id}", got=f"plan {signed.plan_id}"
            )
        _check_signed(files, signed.targets)
        # From here on nothing can be stored that the root's keys did not sign.
        if not has_verified(own_part):
            num_bytes = sum(entry.num_bytes for entry in files)
            # Twice: a file may need a folder of its own.
            num_entries = 2 * len(files) + _NUM_OWN_FOLDERS
            inbox.make_room(num_bytes, num_entries, own_part, signed=True)
        # The first of these writes makes `targets/`, which `has_verified` takes as the sign that the metadata
        # verified.
        part.write(other_ranges)
        if not part.finish():
            return BundleProgress(missing=tuple(part.missing(shard_bytes)))
    except (TrustError, FormatError):
        part.discard()
        inbox.tidy()
        raise
    open_to_group(target, inbox.folder)
    _put_bundle(target, home)
    # Remembered last: a version that counts as seen is here whole.
    verify_bundle_metadata(home / "bundle", inbox.root(), state=inbox.versions, remember=True)
    # An earlier plan no longer verifies beside it, and goes.
    inbox.tidy()
    return BundleProgress(complete=True)


def _is_metadata(path: str) -> bool:
    return _METADATA.fullmatch(path) is not None


def _put_bundle(target: Path, home: Path) -> None:
    """Give a complete bundle its name, in the place of another one unless the worker reads that just now."""
    with lock_if_unread(home) as idle:
        if not idle:
            raise BusyError(
                str(home),
                expected="a bundle that is not in use",
                got="one that the worker is reading",
                remedy="Nothing to do: the courier tries again by itself.",
            )
        remove(home / "bundle")
        move_into_place(target, home / "bundle")


def _check_index(files: Sequence[IndexEntry], plan_id: str, bundle_bytes: int) -> None:
    """Refuse an index that does not describe a bundle of this plan within the site's bounds."""
    num_bytes = sum(entry.num_bytes for entry in files)
    if num_bytes > bundle_bytes:
        raise PolicyError(
            "bundle",
            expected=f"at most {bundle_bytes} bytes",
            got=f"{num_bytes}",
            remedy=(
                "Raise max_bundle_bytes in silo.toml, or ask the aggregator for a plan with a smaller "
                "encoder or autoencoder."
            ),
        )
    num_without_digest = sum(entry.digest is None for entry in files)
    if num_without_digest:
        raise DocumentError(
            "bundle index",
            expected="a digest for every file",
            got=f"{num_without_digest} files without one",
        )
    # Metadata are stored before anything has verified: documents side by side, and no folder that a program would load.
    num_elsewhere = sum(
        not (_is_metadata(entry.path) or entry.path.startswith(f"targets/{plan_id}/"))
        for entry in files
    )
    if num_elsewhere:
        raise DocumentError(
            "bundle index",
            expected=f"documents in metadata/ and files in targets/{plan_id}/",
            got=f"{num_elsewhere} elsewhere",
        )
    metadata_bytes = sum(entry.num_bytes for entry in files if _is_metadata(entry.path))
    if metadata_bytes > MAX_METADATA_BYTES:
        raise PolicyError(
            "bundle metadata",
            expected=f"at most {MAX_METADATA_BYTES} bytes",
            got=f"{metadata_bytes}",
            remedy=(
                "Raise max_bundle_bytes in silo.toml, or ask the aggregator for a plan with a smaller "
                "encoder or autoencoder."
            ),
        )


def _check_signed(files: Sequence[IndexEntry], targets: Mapping[str, SignedFile]) -> None:
    """Require that the index lists exactly the files that the metadata sign."""
    signed = {}
    for path, target in targets.items():
        signed[f"targets/{path}"] = (target.bytes, target.digest)
    offered = {
        entry.path: (entry.num_bytes, entry.digest)
        for entry in files
        if not _is_metadata(entry.path)
    }
    if offered != signed:
        raise DigestError(
            "bundle index",
            expected="exactly the signed files",
            got=f"{len(offered.items() ^ signed.items())} entries that differ",
        )


def _list_bundle(bundle: Path, bundle_bytes: int) -> tuple[IndexEntry, ...]:
    """List a complete bundle with digests; nothing where it is not one that could travel."""
    try:
        return list_folder(
            bundle, max_files=MAX_BUNDLE_FILES, max_bytes=bundle_bytes, with_digest=True
        )
    except (TrustError, FormatError):
        return ()
