"""Takes a plan's bundle into the inbox: its metadata first, and the rest only once the pinned root vouches for it.

Before a byte of a plan's files is kept, the chain of signatures from the root to their digests has verified, and the
index names exactly the signed files. What verified and is complete takes the place of an earlier bundle of that plan.
"""

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
from silo.courier.inbox import MAX_METADATA_BYTES, Inbox, has_signed, remove

_METADATA = "metadata/"


def take_bundle(
    offer: Offer, pieces: Sequence[memoryview], inbox: Inbox, *, bundle_bytes: int, shard_bytes: int
) -> BundleProgress:
    """Keep what verifies of the bytes that came, and tell what is missing.

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
        home = inbox.folder / offer.plan_id
        if (home / "bundle").exists() and _held(home / "bundle", bundle_bytes) == files:
            return BundleProgress(complete=True)
        return _collect(offer, files, pieces, inbox, shard_bytes)


def _collect(
    offer: Offer,
    files: tuple[IndexEntry, ...],
    pieces: Sequence[memoryview],
    inbox: Inbox,
    shard_bytes: int,
) -> BundleProgress:
    home = inbox.folder / offer.plan_id
    ranges = list(zip(offer.spans, pieces, strict=True))
    # Of each index a part of its own: what a stranger offers under a plan's name takes nothing from the plan.
    target = home / sha256_hex("".join(entry.model_dump_json() for entry in files).encode())[:16]
    own = target.with_name(f"{target.name}.part")
    if not own.exists():
        metadata = [entry for entry in files if entry.path.startswith(_METADATA)]
        inbox.make_room(
            sum(entry.num_bytes for entry in metadata), len(files) + 8, own, signed=False
        )
        group_folder(home, inbox.folder)
    part = PartFolder(target, files)
    try:
        part.write((span, data) for span, data in ranges if span.path.startswith(_METADATA))
        if lacking := tuple(
            span for span in part.missing(shard_bytes) if span.path.startswith(_METADATA)
        ):
            return BundleProgress(missing=lacking)
        signed = verify_bundle_metadata(own, inbox.root(), state=inbox.memory)
        if signed.plan_id != offer.plan_id:
            raise ReplayError(
                "bundle", expected=f"plan {offer.plan_id}", got=f"plan {signed.plan_id}"
            )
        _check_signed(files, signed.targets)
        if not has_signed(own):
            inbox.make_room(
                sum(entry.num_bytes for entry in files), 2 * len(files) + 8, own, signed=True
            )
        part.write((span, data) for span, data in ranges if not span.path.startswith(_METADATA))
        if not part.finish():
            return BundleProgress(missing=tuple(part.missing(shard_bytes)))
    except (TrustError, FormatError):
        part.discard()
        inbox.tidy()
        raise
    open_to_group(target, inbox.folder)
    _put(target, home)
    verify_bundle_metadata(home / "bundle", inbox.root(), state=inbox.memory, remember=True)
    inbox.tidy()  # an earlier plan does not verify beside it
    return BundleProgress(complete=True)


def _put(target: Path, home: Path) -> None:
    """Give a complete bundle its name, in the place of another one unless the worker reads that just now."""
    with lock_if_unread(home) as idle:
        if not idle:
            raise BusyError(
                str(home),
                expected="a bundle that nobody reads",
                got="one that the worker is reading",
            )
        remove(home / "bundle")
        move_into_place(target, home / "bundle")


def _check_index(files: Sequence[IndexEntry], plan_id: str, bundle_bytes: int) -> None:
    if (num_bytes := sum(entry.num_bytes for entry in files)) > bundle_bytes:
        raise PolicyError("bundle", expected=f"at most {bundle_bytes} bytes", got=f"{num_bytes}")
    if missing := sum(entry.digest is None for entry in files):
        raise DocumentError(
            "bundle index", expected="a digest for every file", got=f"{missing} files without one"
        )
    if odd := sum(not entry.path.startswith((_METADATA, f"targets/{plan_id}/")) for entry in files):
        expected = f"files in metadata/ and targets/{plan_id}/"
        raise DocumentError("bundle index", expected=expected, got=f"{odd} elsewhere")
    metadata_bytes = sum(entry.num_bytes for entry in files if entry.path.startswith(_METADATA))
    if metadata_bytes > MAX_METADATA_BYTES:
        raise PolicyError(
            "bundle metadata",
            expected=f"at most {MAX_METADATA_BYTES} bytes",
            got=f"{metadata_bytes}",
        )


def _check_signed(files: Sequence[IndexEntry], targets: Mapping[str, SignedFile]) -> None:
    signed = {f"targets/{path}": (target.bytes, target.digest) for path, target in targets.items()}
    offered = {
        entry.path: (entry.num_bytes, entry.digest)
        for entry in files
        if not entry.path.startswith(_METADATA)
    }
    if offered != signed:
        got = f"{len(offered.items() ^ signed.items())} entries that differ"
        raise DigestError("bundle index", expected="exactly the signed files", got=got)


def _held(bundle: Path, bundle_bytes: int) -> tuple[IndexEntry, ...]:
    """List a complete bundle with digests; nothing where it is not one that could travel."""
    try:
        return list_folder(
            bundle, max_files=MAX_BUNDLE_FILES, max_bytes=bundle_bytes, with_digest=True
        )
    except (TrustError, FormatError):
        return ()
