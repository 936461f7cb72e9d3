"""Writes the public form of the log, C2SP tlog-tiles: static files for a web server, for readers and for witnesses.

Tiles and entry bundles come first and the checkpoint last, so that whoever reads meanwhile finds a whole log. The roots
of trust lie beside them, by which a reader follows a rotated log key.
"""

from dataclasses import replace
from pathlib import Path

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.publishing.home import Home
from ddm.publishing.journal import CHECKPOINT, COSIGNED, PUBLIC, Journal, check_continues, stage
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import SignedCheckpoint, open_checkpoint
from ddm.trust.log.note import MAX_NOTE_BYTES, SignedNote, VerifierKey
from ddm.trust.log.tiles import layout
from ddm.trust.repository import Repository


def public_folder(home: Home) -> Path:
    """Return the folder of the public form, which the commands that sign keep up to date."""
    return home.path / PUBLIC


def sign_waiting(home: Home, key: SigningKey) -> Journal:
    """Cover entries that wait unsigned with a checkpoint; return the log.

    Raises:
        SetupError: the federation's root names no log, or another key.
        BusyError: another process signs.
    """
    with home.signing_lock():
        log_key = log_key_of(Repository(home.tuf).root())
        if log_key is None:
            raise SetupError(
                "root", expected="the key of the federation's log, log_key", got="a root without it"
            )
        change = Change.begin(home.path, beside_waiting=True)
        journal = stage(home, change, log_key, key, [])
        change.commit()
        export_log(home, public_folder(home))
        return journal


def export_log(home: Home, out: Path) -> None:
    """Bring a public copy of the log up to date with its last checkpoint.

    Raises:
        SetupError: the copy there is of another log, or of more entries: this folder is older than it.
    """
    journal = Journal.load(home)
    if journal.signed is None:
        return
    entries = journal.entries[: journal.signed.size]
    check_continues(out / "checkpoint", replace(journal, entries=entries))
    for path, data in layout(entries):
        if not (out / path).exists():
            write_atomic(out / path, data)
    for root in sorted(home.tuf.glob("*.root.json")):
        if not (out / root.name).exists():
            write_atomic(out / root.name, root.read_bytes())
    for cosigned in sorted((home.path / COSIGNED).glob("*")):
        copy = out / "cosigned" / cosigned.name
        if not copy.exists() or copy.read_bytes() != cosigned.read_bytes():
            write_atomic(copy, cosigned.read_bytes())
    encoded = journal.signed.encode()
    if not (out / "checkpoint").exists() or (out / "checkpoint").read_bytes() != encoded:
        write_atomic(out / "checkpoint", encoded)


def add_cosignatures(home: Home, cosigned: Path) -> int:
    """Add the signatures under a copy of the last checkpoint, by witnesses, to it; return how many are new.

    Raises:
        SetupError: it is a copy of another checkpoint.
        SignatureError: the log's own signature on it is invalid.
    """
    with home.signing_lock():
        log_key = log_key_of(Repository(home.tuf).root())
        data = read_bounded(cosigned, MAX_NOTE_BYTES)
        theirs = open_checkpoint(
            data, [VerifierKey.parse(log_key)] if log_key else [], cosigned.name
        )
        return keep_cosignatures(home, theirs)


def keep_cosignatures(home: Home, theirs: SignedCheckpoint) -> int:
    """Add the signatures on a copy of the last checkpoint to it; return how many are new. The caller has the lock.

    A witness's later cosignature takes the place of its earlier one. The cosigned checkpoint is kept by its size, since
    readers of this version ask for it when the log has grown.

    Raises:
        SetupError: it is a copy of another checkpoint: the log was signed again meanwhile.
    """
    ours = Journal.load(home).signed
    if ours is None or theirs.checkpoint != ours.checkpoint:
        expected = f"a copy of the last checkpoint, of {ours.size if ours else 0} entries"
        raise SetupError(
            "cosigned checkpoint", expected=expected, got=f"one of {theirs.size} entries"
        )
    new = [each for each in theirs.note.signatures if each not in ours.note.signatures]
    replaced = {(each.name, each.key_id) for each in new}
    kept = [each for each in ours.note.signatures if (each.name, each.key_id) not in replaced]
    if new:
        # As a reader would read it: too many signatures would make it unreadable for all.
        note = SignedNote.parse(
            SignedNote(ours.note.text, (*kept, *new)).encode(), "cosigned checkpoint"
        )
        write_atomic(home.path / COSIGNED / str(ours.size), note.encode())
        write_atomic(home.path / CHECKPOINT, note.encode())
        export_log(home, public_folder(home))
    return len(new)
