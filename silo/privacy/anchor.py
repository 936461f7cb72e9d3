"""What holds a ledger from outside: anchors on other disks, and the chains in submissions that were sent.

A ledger that is put back, together with its head and draws, looks genuine by itself. An anchor is a small file on
another disk with the ledger's head, written with every record and before any noise is drawn; a submission in the outbox
carries the digest of every record up to then. A ledger that does not extend all of them draws nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddm.errors import DocumentError, FormatError, LedgerError
from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import lock_file
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, NaturalInt
from ddm.protocol.submission import Submission

_MAX_BYTES = 4096
_PUT_BACK = (
    "The ledger was put back, copied to a second site or replaced: restore the newest one from backup, and work in one "
    "copy of the site only. Nothing is drawn until it fits."
)


class Anchor(Document):
    """How far the ledger had grown: the number of its records and the digest of the last."""

    format: Literal["archipelago/ledger-anchor/1"] = "archipelago/ledger-anchor/1"
    num_entries: NaturalInt
    head_digest: Digest


@dataclass(frozen=True)
class Guard:
    """Everything outside a ledger with which it is compared.

    Attributes:
        anchors: files that state its head; each must exist.
        chains: the digests of its first records, oldest first, as submissions that were sent carry them.
    """

    anchors: tuple[Path, ...] = ()
    chains: tuple[tuple[str, ...], ...] = ()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold every anchor for one process at a time, also against a copy of the site that has a ledger of its own.

        Raises:
            LedgerError: an anchor is missing, or lies where this user cannot write.
        """
        with ExitStack() as stack:
            for path in self.anchors:
                # This comes before the lock, whose file would otherwise be made in the empty folder of a disk that is
                # not mounted.
                _read(path)
                lock_path = path.with_name(f"{path.name}.lock")
                try:
                    stack.enter_context(lock_file(lock_path))
                except OSError as error:
                    raise unwritable(path, error) from error
            yield

    def hold(self, genesis: str, digests: Sequence[str]) -> None:
        """Refuse a ledger that lacks a record which an anchor or a submission names; bring anchors up to it.

        An anchor is behind after a crash between the two writes, and no noise was drawn for what it lacks.

        Args:
            genesis: stands for the last record of an empty ledger.
            digests: the digests of every record, oldest first.

        Raises:
            LedgerError: it was put back, copied or replaced, and nothing was changed; or an anchor cannot be written.
        """
        # The head after each number of records, from none on.
        heads = (genesis, *digests)
        anchors = {path: _read(path) for path in self.anchors}
        for path, anchor in anchors.items():
            num_entries = anchor.num_entries
            is_shorter = len(heads) <= num_entries
            if is_shorter or heads[num_entries] != anchor.head_digest:
                witness = f"its anchor {path.name}"
                _refuse(witness, num_entries, anchor.head_digest, digests)
        for chain in self.chains:
            # A ledger with fewer records than the submission names fails here too, since its beginning is shorter.
            first_digests = tuple(digests[: len(chain)])
            if first_digests != chain:
                _refuse("a submission in the outbox", len(chain), chain[-1], digests)
        # Only now is anything written: a ledger that is refused must leave its anchors as they are.
        for path, anchor in anchors.items():
            if anchor.num_entries == len(digests):
                continue
            try:
                _write(path, len(digests), heads[-1])
            except OSError as error:
                raise unwritable(path, error) from error

    def record(self, num_entries: int, head_digest: str) -> None:
        """Write the head to every anchor; call it once the record is durable and before anything is drawn for it.

        Raises:
            OSError: an anchor cannot be written.
        """
        for path in self.anchors:
            _write(path, num_entries, head_digest)


def sent_chains(outbox: Path) -> tuple[tuple[str, ...], ...]:
    """Read the chain of every submission in the outbox.

    Raises:
        LedgerError: one of them cannot be read.
    """
    # The aggregator has these submissions, so that no copy of the ledger can deny what they state.
    chains = []
    for path in sorted(outbox.glob("*/*/silos/*/submission.json")):
        try:
            data = read_bounded(path, MAX_DOCUMENT_BYTES)
            submission = Submission.parse(data, subject="submission.json")
        except (FormatError, OSError) as error:
            raise LedgerError(
                "submission in the outbox",
                expected="as it was sent",
                got=f"one that cannot be read ({type(error).__name__})",
                remedy="Restore outbox/ from backup: the ledger is compared with what was sent.",
            ) from error
        chains.append(submission.ledger.chain)
    return tuple(chains)


def _refuse(
    witness: str,
    num: int,
    last: str,
    digests: Sequence[str],
) -> None:
    """Refuse a ledger of which `witness` says that its record of this number has the digest `last`."""
    got = f"{len(digests)} records"
    # A ledger that is long enough is a fork: it has another record in this place.
    if 0 < num <= len(digests):
        digest_here = digests[num - 1]
        got = f"record {num} is {digest_here[:16]}"
    expected = f"a ledger that extends {witness}: record {num} is {last[:16]}"
    raise LedgerError("ledger", expected=expected, got=got, remedy=_PUT_BACK)


def _write(path: Path, num_entries: int, head_digest: str) -> None:
    anchor = Anchor(num_entries=num_entries, head_digest=head_digest)
    write_atomic(path, anchor.encode(), mode=0o600)


def _read(path: Path) -> Anchor:
    try:
        data = path.read_bytes()
        return Anchor.parse(data, subject="ledger anchor", limit=_MAX_BYTES)
    except (OSError, DocumentError) as error:
        got = f"a file that is missing or damaged ({type(error).__name__})"
        remedy = "Mount the disk that holds it, or restore it from backup; silo.toml names it, ledger.anchor."
        raise LedgerError("ledger anchor", expected=str(path), got=got, remedy=remedy) from error


def unwritable(path: Path, error: OSError) -> LedgerError:
    """Return the error for an anchor that this user cannot write."""
    remedy = "Mount its disk, and let the worker's user write in the folder."
    got = error.strerror or type(error).__name__
    return LedgerError(
        "ledger anchor",
        expected=f"{path}, in a folder that the worker can write to",
        got=got,
        remedy=remedy,
    )
