"""Detects split views: compares two checkpoints of one log, of which the later one must have grown from the earlier.

A log that shows two histories must sign two checkpoints of which neither is the beginning of the other. It cannot prove
otherwise to anybody who has both. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ddm.errors import FormatError, SplitViewError, TrustError
from ddm.trust.log.checkpoint import SignedCheckpoint
from ddm.trust.log.merkle import check_consistency, leaf_hash, root_hash
from ddm.trust.log.proof import ConsistencyProofs


@dataclass(frozen=True)
class ProvenCheckpoint:
    """A log as one reader was shown it.

    Attributes:
        signed: its checkpoint.
        proofs: from earlier checkpoints to this one; none of them is verified yet.
    """

    signed: SignedCheckpoint
    proofs: ConsistencyProofs


def check_same_history(known: ProvenCheckpoint, shown: ProvenCheckpoint, subject: str) -> None:
    """Check that one of two checkpoints is the beginning of the other.

    Args:
        known: what this reader, or another one, saw before.
        shown: what this reader is shown now.
        subject: what is shown, for errors.

    Raises:
        SplitViewError: they differ at one size, or the proof from the earlier to the later one is missing or wrong.
    """
    # What is shown now may well be the earlier one, of an older release.
    earlier, later = sorted((known, shown), key=lambda checkpoint: checkpoint.signed.size)
    old = earlier.signed
    new = later.signed
    if old.checkpoint.origin != new.checkpoint.origin:
        raise SplitViewError(
            subject,
            expected=f"log {known.signed.checkpoint.origin}",
            got="a log of another name",
        )
    if old.size == new.size:
        if old.root != new.root:
            raise _split_view_error(known, shown, subject)
        return
    proof = later.proofs.starting_at(old.size)
    if proof is None:
        # Without a proof nothing is wrong yet, but a log that keeps two histories would withhold it too.
        raise SplitViewError(
            subject,
            expected=f"a proof that the log of {old.size} entries is the beginning of that of {new.size}",
            got="no proof from this size",
        )
    try:
        check_consistency(old.size, old.root, new.size, new.root, proof, subject)
    except (TrustError, FormatError) as error:
        raise _split_view_error(known, shown, subject) from error


def check_against_entries(signed: SignedCheckpoint, entries: Sequence[bytes], subject: str) -> None:
    """Check that a checkpoint describes the beginning of a log whose entries are at hand.

    Raises:
        SplitViewError: the log's own entries have another root at this size.
        FormatError: the checkpoint is of more entries than there are.
    """
    if signed.size > len(entries):
        raise FormatError(
            subject,
            expected=f"at most {len(entries)} entries",
            got=f"a checkpoint of {signed.size}",
            remedy="This copy of the log is older than the checkpoint. Fetch the log again, then compare.",
        )
    root = root_hash([leaf_hash(entry) for entry in entries[: signed.size]])
    if root != signed.root:
        raise SplitViewError(
            subject,
            expected=f"root {signed.root.hex()[:16]}... at {signed.size} entries, as the log signed",
            got=f"entries with root {root.hex()[:16]}...",
        )


def _split_view_error(
    known: ProvenCheckpoint,
    shown: ProvenCheckpoint,
    subject: str,
) -> SplitViewError:
    return SplitViewError(
        subject,
        expected=f"a log that continues {_describe(known.signed)}, as seen before",
        got=_describe(shown.signed),
    )


def _describe(signed: SignedCheckpoint) -> str:
    return f"{signed.size} entries with root {signed.root.hex()[:16]}..."
