"""Writes the public form of the log, C2SP tlog-tiles: static files for a web server, for readers and for witnesses.

Tiles and entry bundles come first and the checkpoint last, so that anybody who reads meanwhile finds a whole log. The
roots of trust are beside them, by which a reader follows a rotated log key.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic, write_for_everyone
from ddm.publishing.folder import PublisherFolder
from ddm.publishing.log import (
    CHECKPOINT,
    COSIGNED,
    PUBLIC,
    TransparencyLog,
    check_continues,
    require_log_key,
    stage_entries,
)
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import SignedCheckpoint, open_checkpoint
from ddm.trust.log.note import MAX_NOTE_BYTES, SignedNote, VerifierKey
from ddm.trust.log.tiles import layout
from ddm.trust.repository import Repository


def public_folder(publisher: PublisherFolder) -> Path:
    """Return the folder of the public form, which the commands that sign keep up to date."""
    return publisher.path / PUBLIC


def sign_waiting(publisher: PublisherFolder, key: SigningKey) -> TransparencyLog:
    """Cover entries that wait unsigned with a checkpoint; return the log.

    Raises:
        SetupError: the federation's root names no log, or another key.
        BusyError: another process signs.
    """
    with publisher.signing_lock():
        log_key = require_log_key(publisher)
        # A change that waits for holders touches other files than the log's.
        change = Change.begin(publisher.path, beside_waiting=True)
        log = stage_entries(publisher, change, log_key, key, [])
        change.commit()
        export_log(publisher, public_folder(publisher))
        return log


def export_log(publisher: PublisherFolder, out: Path, *, for_everyone: bool = False) -> None:
    """Bring a public copy of the log up to date with its last checkpoint.

    Args:
        publisher: whose log it is.
        out: the folder of the copy.
        for_everyone: whether every user of the machine may read it, such as the web server that serves it.

    Raises:
        SetupError: the copy there is of another log, or of more entries: this folder is older than it.
    """
    # Entries that no checkpoint covers yet are not public.
    log = TransparencyLog.load(publisher)
    if log.signed is None:
        return
    signed_entries = log.entries[: log.signed.size]
    check_continues(out / "checkpoint", replace(log, entries=signed_entries))
    write = write_for_everyone if for_everyone else write_atomic
    # Tiles and roots never change once they are written.
    for path, data in layout(signed_entries):
        if not (out / path).exists():
            write(out / path, data)
    for root in sorted(publisher.tuf.glob("*.root.json")):
        if not (out / root.name).exists():
            write(out / root.name, root.read_bytes())
    # Unlike a tile, a cosigned checkpoint changes: witnesses add their signatures later.
    for cosigned in sorted((publisher.path / COSIGNED).glob("*")):
        _write_if_changed(write, out / "cosigned" / cosigned.name, cosigned.read_bytes())
    # The checkpoint comes last: whatever it describes is already there for the one who reads it.
    _write_if_changed(write, out / "checkpoint", log.signed.encode())


def _write_if_changed(write: Callable[[Path, bytes], None], path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write(path, data)


def add_cosignatures(publisher: PublisherFolder, cosigned: Path) -> int:
    """Add the signatures under a copy of the last checkpoint, by witnesses, to it; return how many are new.

    Raises:
        SetupError: it is a copy of another checkpoint.
        SignatureError: the log's own signature on it is invalid.
    """
    with publisher.signing_lock():
        log_key = log_key_of(Repository(publisher.tuf).root())
        log_keys = [VerifierKey.parse(log_key)] if log_key else []
        copy = open_checkpoint(read_bounded(cosigned, MAX_NOTE_BYTES), log_keys, cosigned.name)
        return keep_cosignatures(publisher, copy)


def keep_cosignatures(publisher: PublisherFolder, copy: SignedCheckpoint) -> int:
    """Add the signatures on a copy of the last checkpoint to it; return how many are new. The caller has the lock.

    A witness's later cosignature takes the place of its earlier one. The cosigned checkpoint is kept by its size, since
    readers of this version ask for it when the log has grown.

    Raises:
        SetupError: it is a copy of another checkpoint: the log was signed again meanwhile.
    """
    last = TransparencyLog.load(publisher).signed
    if last is None or copy.checkpoint != last.checkpoint:
        raise SetupError(
            "cosigned checkpoint",
            expected=f"a copy of the last checkpoint, of {last.size if last else 0} entries",
            got=f"one of {copy.size} entries",
        )
    old_signatures = last.note.signatures
    new_signatures = [line for line in copy.note.signatures if line not in old_signatures]
    if not new_signatures:
        return 0
    replaced = {(line.name, line.key_id) for line in new_signatures}
    kept_signatures = [line for line in old_signatures if (line.name, line.key_id) not in replaced]
    cosigned = SignedNote(last.note.text, (*kept_signatures, *new_signatures))
    # Parsed as a reader would: too many signatures would make the checkpoint unreadable for everybody.
    encoded = SignedNote.parse(cosigned.encode(), "cosigned checkpoint").encode()
    write_atomic(publisher.path / COSIGNED / str(last.size), encoded)
    write_atomic(publisher.path / CHECKPOINT, encoded)
    export_log(publisher, public_folder(publisher))
    return len(new_signatures)
