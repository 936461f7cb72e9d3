"""Changes the federation's `root` and `targets`: drafts documents, collects holders' signatures, applies all at once.

If `keys/` holds enough holders' keys, as after `aggregator init`, all of it happens in one command. Otherwise the
documents wait in `ceremony/`, each with a description in words; a holder answers with a small signature file beside it,
and `aggregator complete` continues. A waiting change survives restarts, and only one can wait.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from aggregator.config import Federation
from aggregator.intake.quarantine import quarantined_submissions
from aggregator.keys.silo_rotation import check_cards_unchanged
from aggregator.membership.invitation import make_invitation
from aggregator.membership.registry import active_cards
from aggregator.membership.withdrawal import check_still_carried, withdrawn_silos
from ddm.errors import BusyError, PolicyError, SetupError
from ddm.io.changes import Change
from ddm.io.copying import copy_documents
from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Document,
    PlanId,
    ShortText,
    now_utc,
    sha256_file,
    sha256_hex,
)
from ddm.publishing.keys import MODEL_PUBLIC, key_change, key_changes
from ddm.publishing.log import TransparencyLog, stage_entries
from ddm.publishing.plans import sign_plan_files
from ddm.publishing.public_log import export_log, public_folder
from ddm.trust.ceremony import (
    MAX_REQUEST_BYTES,
    MAX_SIGNATURE_BYTES,
    HolderSignature,
    SigningRequest,
    check_answers,
    describe_missing_signatures,
    describe_request,
    join_signatures,
    sign_request,
)
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.log.entries import FederationOpened, KeyChanged, LogEntry
from ddm.trust.repository import Repository

HOLDER_KEYS = ("root", "targets")


class PendingChange(Document):
    """A change that takes effect once its documents are signed.

    Attributes:
        act: found the federation, start a plan, or renew keys and delegations.
        purpose: the same in words.
        documents: the files that holders sign.
        plan_id: the plan to start.
    """

    format: Literal["archipelago/pending/1"] = "archipelago/pending/1"
    act: Literal["found", "plan", "renew"]
    purpose: ShortText
    documents: tuple[str, ...]
    plan_id: PlanId | None = None


def conduct_ceremony(
    federation: Federation,
    change: Change,
    requests: Sequence[SigningRequest],
    passphrase: bytes,
    *,
    act: Literal["found", "plan", "renew"],
    purpose: str,
    plan_id: str | None = None,
) -> list[str]:
    """Apply a change if all its signatures can be made here; leave it in `ceremony/` otherwise.

    Args:
        federation: its lock is held by the caller.
        change: holds everything but the metadata.
        requests: the documents that holders must sign.
        passphrase: opens the federation's keys.
        act: see `PendingChange`.
        purpose: the same in words.
        plan_id: the plan to start.

    Returns:
        The missing signatures, in words; empty when the change is in force.
    """
    names = tuple(request.name for request in requests)
    pending = PendingChange(act=act, purpose=purpose, documents=names, plan_id=plan_id)
    write_atomic(change.folder / "pending.json", pending.encode())
    for request in requests:
        write_atomic(change.folder / request.name, request.encode())
        write_atomic(
            (change.folder / request.name).with_suffix(".txt"),
            f"{describe_request(request)}\n".encode(),
        )
        _sign_here(federation, change, request, passphrase)
    missing = _missing(change, pending)
    if missing:
        change.wait()
    else:
        _apply(federation, change, pending, passphrase)
    return missing


def complete_change(federation: Federation, passphrase: bytes) -> PendingChange:
    """Apply the change that waits for signatures, and return it.

    Raises:
        MissingFileError: no change waits.
        SetupError: signatures are missing.
        SignatureError: a signature is invalid, or not a holder's.
    """
    with ExitStack() as stack:
        stack.enter_context(federation.signing_lock())
        change = Change.waiting(federation.path)
        pending = _pending(change)
        if pending.act == "plan":
            stack.enter_context(locked(federation.accepted, "intake"))
        missing = _missing(change, pending)
        if missing:
            raise SetupError(
                f"ceremony: {pending.purpose}",
                expected="enough signatures of holders",
                got="; ".join(missing),
                remedy="Have the documents signed: aggregator sign DOCUMENT --key KEYFILE, then run this again.",
            )
        _apply(federation, change, pending, passphrase)
        return pending


def abandon_change(federation: Federation) -> str:
    """Discard the change that waits for signatures; return its purpose.

    Raises:
        MissingFileError: no change waits.
        PolicyError: the change founds the federation.
    """
    with federation.signing_lock():
        change = Change.waiting(federation.path)
        pending = _pending(change)
        if pending.act == "found":
            remedy = "Remove the whole folder and start over with `aggregator init`."
            got = "the founding of the federation, without which nothing remains"
            raise PolicyError(
                str(federation.path),
                expected="a change of a founded federation",
                got=got,
                remedy=remedy,
            )
        change.abandon()
        return pending.purpose


def sign_document(document: Path, key: SigningKey) -> Path:
    """Sign a waiting document as one of its holders; return the signature file to send back.

    Raises:
        BusyError: this holder has signed it already.
        SignatureError: the key is not a holder's.
    """
    answer = sign_request(read_request(document), key)
    path = _answer_path(document, key.public)
    # A signature of a discarded document may still lie here; it does not sign this one.
    if path.exists() and path.read_bytes() == answer.encode():
        remedy = "Nothing needs to be done. Another holder signs with a key of their own."
        raise BusyError(
            path.name, expected="no signature by this key yet", got="its signature", remedy=remedy
        )
    write_atomic(path, answer.encode())
    return path


def read_request(document: Path) -> SigningRequest:
    """Read a document that waits for signatures.

    Raises:
        DocumentError: it is not such a document.
    """
    data = read_bounded(document, MAX_REQUEST_BYTES)
    return SigningRequest.parse(data, subject=document.name, limit=MAX_REQUEST_BYTES)


def check_replaceable(federation: Federation) -> None:
    """Refuse to replace a plan that has submissions in quarantine or in no release yet.

    Raises:
        SetupError: there are such submissions; they could never be published afterwards.
    """
    try:
        plan, _ = federation.current_plan()
    except SetupError:
        return  # no plan yet, or a plan that can no longer be published
    accepted = federation.accepted / plan.plan_id
    releases = [path for path in federation.releases.glob("[0-9]*") if path.name.isdigit()]
    published = {
        path.name
        for release in releases
        for path in release.glob(f"targets/{plan.plan_id}/silos/*")
    }
    remaining = active_cards(federation, plan).keys() - withdrawn_silos(federation, plan)
    undecided = {
        each.record.silo_id for each in quarantined_submissions(federation, plan.plan_id)
    } & remaining
    if undecided:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="no submission in quarantine before the next plan",
            got=f"submissions of {', '.join(sorted(undecided))} in quarantine",
            remedy="Decide on each: aggregator admit or refuse, then aggregator run, which signs the answer; "
            "or withdraw the silo.",
        )
    waiting = {silo_id for silo_id in remaining if (accepted / silo_id).is_dir()} - published
    if waiting:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="every accepted submission in a release before the next plan",
            got=f"no release with that of {', '.join(sorted(waiting))}",
            remedy="Publish first: aggregator router, then aggregator publish.",
        )


def _answer_path(document: Path, key: PublicKey) -> Path:
    return document.with_name(f"{document.name}.{key.fingerprint[:16]}.sig")


def _pending(change: Change) -> PendingChange:
    return PendingChange.parse(
        read_bounded(change.folder / "pending.json", MAX_DOCUMENT_BYTES), subject="pending.json"
    )


def _sign_here(
    federation: Federation, change: Change, request: SigningRequest, passphrase: bytes
) -> None:
    """Sign with the holders' keys that are on this machine, the present ones and those of this change."""
    holder_keys = {key for holders in request.holders() for key in holders.keys}
    for folder in (federation.keys, change.put("keys")):
        for name in HOLDER_KEYS:
            public = folder / f"{name}.pub"
            if public.exists() and PublicKey.load(public) in holder_keys:
                key = SigningKey.load(folder / f"{name}.key", passphrase)
                answer = sign_request(request, key).encode()
                write_atomic(_answer_path(change.folder / request.name, key.public), answer)


def _answers(change: Change, name: str) -> list[HolderSignature]:
    paths = sorted(change.folder.glob(f"{name}.*.sig"))
    return [
        HolderSignature.parse(read_bounded(path, MAX_SIGNATURE_BYTES), subject=path.name)
        for path in paths
    ]


def _missing(change: Change, pending: PendingChange) -> list[str]:
    found: list[str] = []
    for name in pending.documents:
        request = read_request(change.folder / name)
        found += describe_missing_signatures(
            request, check_answers(request, _answers(change, name))
        )
    # a new root that keeps its holders needs the same signatures twice
    return list(dict.fromkeys(found))


def _apply(
    federation: Federation, change: Change, pending: PendingChange, passphrase: bytes
) -> None:
    """Sign the remaining metadata with the federation's own keys, on a copy, and move everything into place."""
    signed: dict[str, bytes] = {}
    for name in pending.documents:
        request = read_request(change.folder / name)
        signed[request.role] = join_signatures(
            request, check_answers(request, _answers(change, name))
        )
    metadata = change.put("tuf/metadata")
    shutil.rmtree(metadata, ignore_errors=True)
    copy_documents(federation.tuf, metadata)

    def key(name: str) -> SigningKey:
        new = change.put(f"keys/{name}.key")
        return SigningKey.load(new if new.exists() else federation.keys / f"{name}.key", passphrase)

    if pending.act == "found":
        _found(federation, change, metadata, signed, key)
        entries = _opening(federation, change, Repository(metadata), signed["root"])
        _write_down(federation, change, Repository(metadata), key, entries)
    elif pending.act == "plan":
        _start_plan(
            federation, change, Repository(metadata), str(pending.plan_id), signed["targets"], key
        )
    else:
        renewed = {
            name: key(name)
            for name in ("plans", "release")
            if change.put(f"keys/{name}.key").exists()
        }
        Repository(metadata).renew(
            root=signed.get("root"),
            targets=signed.get("targets"),
            plans_key=renewed.get("plans"),
            release_key=renewed.get("release"),
            online_key=key("online"),
            now=now_utc(),
        )
        entries = list(key_changes(Repository(federation.tuf), Repository(metadata)))
        _write_down(federation, change, Repository(metadata), key, entries)
    change.commit()
    export_log(federation, public_folder(federation))


def _write_down(
    federation: Federation,
    change: Change,
    repository: Repository,
    key: Callable[[str], SigningKey],
    entries: Sequence[LogEntry],
) -> TransparencyLog | None:
    """Add entries to the log with this change; return the log, None where the root names none."""
    log_key = log_key_of(repository.root())
    return (
        stage_entries(federation, change, log_key, key("log"), entries)
        if log_key is not None
        else None
    )


def _opening(
    federation: Federation, change: Change, repository: Repository, root: bytes
) -> list[LogEntry]:
    """Return the first entries of a log: the federation, and each of its keys."""
    return [
        FederationOpened(federation=federation.settings().name, root_digest=sha256_hex(root)),
        *key_changes(None, repository),
        key_change("receipts", PublicKey.load(change.put("keys/receipts.pub"))),
        KeyChanged(key="model-signing", fingerprints=(sha256_file(change.put(MODEL_PUBLIC)),)),
        KeyChanged(key="tls", fingerprints=(sha256_file(federation.path / "tls" / "server.pem"),)),
    ]


def _found(
    federation: Federation,
    change: Change,
    metadata: Path,
    signed: Mapping[str, bytes],
    key: Callable[[str], SigningKey],
) -> None:
    Repository.create(
        metadata,
        root=signed["root"],
        targets=signed["targets"],
        plans_key=key("plans"),
        release_key=key("release"),
        online_key=key("online"),
        now=now_utc(),
    )
    write_atomic(
        change.put("invitation.json"), make_invitation(federation, signed["root"]).encode()
    )


def _start_plan(
    federation: Federation,
    change: Change,
    repository: Repository,
    plan_id: str,
    targets: bytes,
    key: Callable[[str], SigningKey],
) -> None:
    """Sign the list of the plan's files, and complete the bundle for the silos."""
    check_replaceable(federation)
    bundle = change.put(f"plans/{plan_id}/bundle")
    plan = sign_plan_files(
        federation, change, repository, bundle / "targets" / plan_id, targets, key
    )
    check_still_carried(federation, plan)
    check_cards_unchanged(federation, plan, repository.delegates().silos)
    repository.export_bundle(bundle)
