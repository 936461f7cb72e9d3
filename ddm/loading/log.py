"""Checks that a published manifest, or a signed plan, is in the federation's log; compares the log with other views."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ddm.errors import RootError, TrustError
from ddm.protocol.manifest import Manifest
from ddm.trust.log.checkpoint import open_checkpoint
from ddm.trust.log.checkpoint_store import CheckpointStore
from ddm.trust.log.entries import LogEntry, VersionPublished, encode_entry
from ddm.trust.log.note import VerifierKey
from ddm.trust.log.proof import (
    MAX_CONSISTENCY_BYTES,
    ConsistencyProofs,
    InclusionProof,
    checkpoint_in,
)
from ddm.trust.log.split_view import ProvenCheckpoint, check_same_history
from ddm.trust.log.witness import Witnesses


@dataclass(frozen=True)
class LogRequirements:
    """What a reader demands of a release's log, beyond the release's own proofs.

    Attributes:
        checkpoints: checkpoints of the log that others were shown, by what to call them; the release's log must
            continue them, or be continued by them.
        witnesses: those who must have cosigned the release's checkpoint, on one of `checkpoints`.
    """

    checkpoints: Mapping[str, bytes] = field(default_factory=dict)
    witnesses: Witnesses | None = None


@dataclass(frozen=True)
class LogView:
    """A federation's log as a release, or a plan's bundle, shows it.

    Attributes:
        view: the signed checkpoint, and proofs from earlier ones.
        keys: those that signed for the log so far, as the roots name them, the newest last.
    """

    view: ProvenCheckpoint
    keys: tuple[VerifierKey, ...]

    def compare(self, other: bytes, subject: str, state: Path | None) -> int:
        """Compare with a checkpoint that somebody else was shown; return its size.

        Args:
            other: a checkpoint, or a ``.tlog-proof`` that ends with one.
            subject: what to call it in errors.
            state: the memory of this federation, where evidence is kept.

        Raises:
            SplitViewError: two histories; both signed checkpoints are kept as evidence.
            TrustError: it is not signed by this log, or this release holds no proof from it or to it.
            DocumentError: it does not parse.
        """
        signed = open_checkpoint(checkpoint_in(other, subject), self.keys, subject)
        mine = self.view.signed
        # This release has consistency proofs only from sizes up to its own.
        is_larger = signed.size > mine.size
        is_unproved = signed.size < mine.size and self.view.proofs.starting_at(signed.size) is None
        if is_larger or is_unproved:
            raise TrustError(
                subject,
                expected=f"a checkpoint for which this release, with a log of {mine.size} entries, contains a proof",
                got=f"one of {signed.size} entries",
                remedy="Compare both with the whole log: `ddm log LOG --root FILE --checkpoint FILE`.",
            )
        theirs = ProvenCheckpoint(signed, ConsistencyProofs())
        if state is None:
            check_same_history(theirs, self.view, subject)
        else:
            CheckpointStore(state).compare(theirs, self.view, subject)
        return signed.size

    def require(self, requirements: LogRequirements, state: Path | None) -> None:
        """Check what a reader demands of the log; see `compare` and `check_witnessed`."""
        for subject, checkpoint in requirements.checkpoints.items():
            self.compare(checkpoint, subject, state)
        if requirements.witnesses is not None:
            self.check_witnessed(requirements.witnesses, requirements.checkpoints)

    def check_witnessed(
        self, witnesses: Witnesses, others: Mapping[str, bytes]
    ) -> Mapping[str, datetime]:
        """Check that witnesses cosigned exactly this checkpoint; return when each did, by name.

        A release has no cosignatures of its own: witnesses are asked once it is in force.

        Args:
            witnesses: those whom the reader trusts.
            others: cosigned copies of the checkpoint, by what to call them; copies of other checkpoints do not count.

        Raises:
            SignatureError: too few did, or a cosignature does not verify.
            DocumentError: a copy does not parse.
        """
        mine = self.view.signed
        copies = [mine]
        for name, data in others.items():
            signed = open_checkpoint(checkpoint_in(data, name), self.keys, name)
            if signed.checkpoint == mine.checkpoint:
                copies.append(signed)
        remedy = f"Pass it cosigned: --checkpoint FILE, which is cosigned/{mine.size} of the federation's public log."
        return witnesses.check(copies, remedy)


def read_log(
    log_keys: tuple[str, ...], proof: bytes, consistency: bytes, entry: LogEntry, subject: str
) -> LogView:
    """Check that an entry is in the log.

    Args:
        log_keys: verifier keys, as the verified roots name them, the newest last; the newest one must have signed.
        proof: the content of the ``.tlog-proof``.
        consistency: the content of `log-consistency.json`.
        entry: what must be in the log.
        subject: the proof's name, for errors.

    Raises:
        RootError: the root names no log.
        TrustError: the checkpoint is not signed by the log, or the entry is not in it.
        FormatError: a file does not parse, or does not fit the checkpoint's size.
    """
    # A federation without a log could show each reader another history.
    if not log_keys:
        raise RootError(
            "root",
            expected="the key of the federation's log, log_key",
            got="a root without it",
            remedy="Take the newest root of this federation; one without log_key was made before its log.",
        )
    keys = tuple(VerifierKey.parse(key) for key in log_keys)
    # Only the newest key counts: an old one that was stolen must not sign new entries.
    signed = InclusionProof.parse(proof, subject).check(encode_entry(entry), keys[-1:], subject)
    proofs = ConsistencyProofs.parse(
        consistency, subject="log-consistency.json", limit=MAX_CONSISTENCY_BYTES
    )
    return LogView(ProvenCheckpoint(signed, proofs), keys)


def entry_of(manifest: Manifest, manifest_digest: str) -> VersionPublished:
    """Return the log's entry for a manifest."""
    return VersionPublished(
        plan_id=manifest.plan_id,
        version=manifest.version,
        manifest_digest=manifest_digest,
        supersedes_digest=manifest.supersedes_digest,
    )
