"""Compares two checkpoints of one log: the later one must have grown from the earlier one. Pure functions.

A log that shows two histories must sign two checkpoints of which neither is the beginning of the other. It cannot prove
otherwise to anybody who has both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ddm.errors import FormatError, SplitViewError, TrustError
from ddm.trust.log.checkpoint import SignedCheckpoint
from ddm.trust.log.merkle import check_consistency, leaf_hash, root_hash
from ddm.trust.log.proof import Consistency


@dataclass(frozen=True)
class View:
    """A log as one reader was shown it.

    Attributes:
        signed: its checkpoint.
        proofs: from earlier checkpoints to this one.
    """

    signed: SignedCheckpoint
    proofs: Consistency


def check_same_history(seen: View, shown: View, subject: str) -> None:
    """Check that one of two views is the beginning of the other.

    Args:
        seen: what this reader, or another one, saw before.
        shown: what this reader is shown now.
        subject: what is shown, for errors.

    Raises:
        SplitViewError: they differ at one size, or the proof from the earlier to the later one is missing or wrong.
    """
    earlier, later = sorted((seen, shown), key=lambda view: view.signed.size)
    old, new = earlier.signed, later.signed
    if old.checkpoint.origin != new.checkpoint.origin:
        raise SplitViewError(
            subject, expected=f"log {seen.signed.checkpoint.origin}", got="a log of another name"
        )
    if old.size == new.size:
        if old.root != new.root:
            raise _split(seen, shown, subject)
        return
    proof = later.proofs.at(old.size)
    if proof is None:
        expected = (
            f"a proof that the log of {old.size} entries is the beginning of that of {new.size}"
        )
        raise SplitViewError(subject, expected=expected, got="no proof from this size")
    try:
        check_consistency(old.size, old.root, new.size, new.root, proof, subject)
    except (TrustError, FormatError) as error:
        raise _split(seen, shown, subject) from error


def check_against_entries(signed: SignedCheckpoint, entries: Sequence[bytes], subject: str) -> None:
    """Check that a checkpoint describes the beginning of a log whose entries are at hand.

    Raises:
        SplitViewError: the log's own entries have another root at this size.
        FormatError: the checkpoint is of more entries than there are.
    """
    if signed.size > len(entries):
        remedy = (
            "This copy of the log is older than the checkpoint. Fetch the log again, then compare."
        )
        got = f"a checkpoint of {signed.size}"
        raise FormatError(
            subject, expected=f"at most {len(entries)} entries", got=got, remedy=remedy
        )
    found = root_hash([leaf_hash(entry) for entry in entries[: signed.size]])
    if found != signed.root:
        expected = f"root {signed.root.hex()[:16]}... at {signed.size} entries, as the log signed"
        raise SplitViewError(
            subject, expected=expected, got=f"entries with root {found.hex()[:16]}..."
        )


def _split(seen: View, shown: View, subject: str) -> SplitViewError:
    before, now = (
        f"{view.signed.size} entries with root {view.signed.root.hex()[:16]}..."
        for view in (seen, shown)
    )
    return SplitViewError(
        subject, expected=f"a log that continues {before}, as seen before", got=now
    )
