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
from ddm.publishing.journal import CHECKPOINT, PUBLIC, Journal, check_continues, stage
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import open_checkpoint
from ddm.trust.log.note import MAX_NOTE_BYTES, Note, VerifierKey
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
            raise SetupError("root", expected="the key of the federation's log, log_key", got="a root without it")
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
        journal = Journal.load(home)
        log_key = log_key_of(Repository(home.tuf).root())
        data = read_bounded(cosigned, MAX_NOTE_BYTES)
        theirs = open_checkpoint(data, [VerifierKey.parse(log_key)] if log_key else [], cosigned.name)
        if journal.signed is None or theirs.checkpoint != journal.signed.checkpoint:
            expected = f"a copy of the last checkpoint, of {journal.signed.size if journal.signed else 0} entries"
            raise SetupError(str(cosigned), expected=expected, got=f"one of {theirs.size} entries")
        ours = journal.signed.note
        new = tuple(each for each in theirs.note.signatures if each not in ours.signatures)
        note = replace(ours, signatures=ours.signatures + new)
        # As a reader would read it: too many signatures would make it unreadable for all.
        write_atomic(home.path / CHECKPOINT, Note.parse(note.encode(), "cosigned checkpoint").encode())
        export_log(home, public_folder(home))
        return len(new)
