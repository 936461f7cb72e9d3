"""Changes the federation's `root` and `targets`: drafts documents, collects holders' signatures, applies all at once.

If `keys/` holds enough holders' keys, as after `aggregator init`, all of it happens in one command. Otherwise the
documents wait in `ceremony/`, each with a description in words; a holder answers with a small signature file beside it,
and `aggregator complete` continues. A waiting change survives restarts, and only one can wait.

Holders sign `root` and `targets` alone. Everything else (plans, releases, snapshot, timestamp, log) is signed when the
change is applied, with the federation's own keys, and moved into place together with the holders' documents.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aggregator.config import Federation
from aggregator.intake.quarantine import quarantined_submissions
from aggregator.keys.silo_rotation import check_cards_unchanged
from aggregator.membership.invitation import INVITATION_NAME, make_invitation
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
from ddm.publishing.log import stage_entries
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
            # For the holders: a person must be able to read what is to be signed.
            (change.folder / request.name).with_suffix(".txt"),
            f"{describe_request(request)}\n".encode(),
        )
        _sign_here(federation, change, request, passphrase)
    missing = _missing(change, pending)
    # A crash before this leaves a staged change, which the next command discards.
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
        # A plan replaces the present one, whose submissions intake must not touch meanwhile.
        if pending.act == "plan":
            stack.enter_context(locked(federation.accepted, "intake"))
        missing = _missing(change, pending)
        if missing:
            raise SetupError(
                f"ceremony: {pending.purpose}",
                expected="enough signatures of holders",
                got="; ".join(missing),
                remedy=(
                    "Have the documents signed: `aggregator sign DOCUMENT --key KEYFILE`. Then run this "
                    "command again."
                ),
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
            raise PolicyError(
                str(federation.path),
                expected="a change of a founded federation",
                got="the change that creates the federation, which cannot be discarded",
                remedy=(
                    "Remove the whole folder and make the federation again: `aggregator init FED --name NAME "
                    "--licence TEXT --address HOST:PORT`."
                ),
            )
        # New keys of this change go with it; none of them has signed anything that is in force.
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
    # A signature of a discarded document may still be here; it does not sign this one.
    if path.exists() and path.read_bytes() == answer.encode():
        raise BusyError(
            path.name,
            expected="no signature by this key yet",
            got="its signature",
            remedy="Nothing needs to be done. Another holder signs with a key of their own.",
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
        # There is no plan yet, or one that can no longer be published.
        return
    accepted = federation.accepted / plan.plan_id
    releases = [path for path in federation.releases.glob("[0-9]*") if path.name.isdigit()]
    # A submission of the present plan that is in no release cannot be published once another plan is signed.
    published = {
        path.name
        for release in releases
        for path in release.glob(f"targets/{plan.plan_id}/silos/*")
    }
    # A silo that was removed or withdrawn is in no further release, so that nothing of it is lost.
    remaining = active_cards(federation, plan).keys() - withdrawn_silos(federation, plan)
    quarantined = {
        entry.record.silo_id for entry in quarantined_submissions(federation, plan.plan_id)
    }
    undecided = quarantined & remaining
    if undecided:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="no submission in quarantine before the next plan",
            got=f"submissions of {', '.join(sorted(undecided))} in quarantine",
            remedy=(
                "Decide on each: `aggregator admit FED SILO --reason TEXT`, or `aggregator refuse FED "
                "SILO --reason TEXT`, then `aggregator run FED`, which signs the answer; or take the "
                "silo out: `aggregator withdraw FED SILO --reason TEXT`."
            ),
        )
    waiting = {silo_id for silo_id in remaining if (accepted / silo_id).is_dir()} - published
    if waiting:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="every accepted submission in a release before the next plan",
            got=f"no release with that of {', '.join(sorted(waiting))}",
            remedy="Publish first: `aggregator release FED --out DIR`.",
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
    # A new root needs signatures of the holders before and after it (TUF specification, 5.3.4).
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
    """Describe the signatures that are missing, one in a line."""
    missing: list[str] = []
    for name in pending.documents:
        request = read_request(change.folder / name)
        signatures = check_answers(request, _answers(change, name))
        missing += describe_missing_signatures(request, signatures)
    # A new root that keeps its holders needs the same signatures twice.
    return list(dict.fromkeys(missing))


@dataclass(frozen=True)
class _Application:
    """A change that is being applied, with all its signatures.

    Attributes:
        federation: as it is until the change is in force.
        change: holds what will replace its files.
        metadata: the staged copy of the federation's metadata.
        documents: role to the document that its holders signed.
        passphrase: opens the federation's keys.
    """

    federation: Federation
    change: Change
    metadata: Path
    documents: Mapping[str, bytes]
    passphrase: bytes

    @property
    def repository(self) -> Repository:
        """The repository as it will be."""
        return Repository(self.metadata)

    def key(self, name: str) -> SigningKey:
        """Open a key of the federation: the new one where this change replaces it."""
        path = self.change.put(f"keys/{name}.key")
        if not path.exists():
            path = self.federation.keys / f"{name}.key"
        return SigningKey.load(path, self.passphrase)

    def renewed_key(self, name: str) -> SigningKey | None:
        """Open the key that this change puts in the place of one of the federation's; None where it does not."""
        if not self.change.put(f"keys/{name}.key").exists():
            return None
        return self.key(name)

    def log_entries(self, entries: Sequence[LogEntry]) -> None:
        """Add entries to the log with this change, where the root names a log."""
        log_key = log_key_of(self.repository.root())
        if log_key is not None:
            stage_entries(self.federation, self.change, log_key, self.key("log"), entries)


def _apply(
    federation: Federation, change: Change, pending: PendingChange, passphrase: bytes
) -> None:
    """Sign the remaining metadata with the federation's own keys, on a copy, and move everything into place."""
    documents: dict[str, bytes] = {}
    for name in pending.documents:
        request = read_request(change.folder / name)
        signatures = check_answers(request, _answers(change, name))
        documents[request.role] = join_signatures(request, signatures)
    # A copy, since the repository's methods write several files: a crash in between would leave a broken federation.
    metadata = change.put("tuf/metadata")
    shutil.rmtree(metadata, ignore_errors=True)
    copy_documents(federation.tuf, metadata)

    application = _Application(federation, change, metadata, documents, passphrase)
    match pending.act:
        case "found":
            _found_federation(application)
        case "plan":
            _start_plan(application, str(pending.plan_id))
        case "renew":
            _renew(application)
    # The public copy of the log comes after the commit: an entry that readers see must be of a change in force.
    change.commit()
    export_log(federation, public_folder(federation))


def _found_federation(application: _Application) -> None:
    federation = application.federation
    change = application.change
    root = application.documents["root"]
    repository = Repository.create(
        application.metadata,
        root=root,
        targets=application.documents["targets"],
        plans_key=application.key("plans"),
        release_key=application.key("release"),
        online_key=application.key("online"),
        now=now_utc(),
    )
    settings = federation.settings()
    invitation = make_invitation(federation, root, f"{settings.host}:{settings.port}")
    write_atomic(change.put(INVITATION_NAME), invitation.encode())
    # The first entries of the log: the federation, and each of its keys.
    certificate = federation.path / "tls" / "server.pem"
    application.log_entries(
        [
            FederationOpened(federation=settings.name, root_digest=sha256_hex(root)),
            *key_changes(None, repository),
            key_change("receipts", PublicKey.load(change.put("keys/receipts.pub"))),
            KeyChanged(key="model-signing", fingerprints=(sha256_file(change.put(MODEL_PUBLIC)),)),
            KeyChanged(key="tls", fingerprints=(sha256_file(certificate),)),
        ]
    )


def _renew(application: _Application) -> None:
    """Put new keys or delegations into force."""
    application.repository.renew(
        root=application.documents.get("root"),
        targets=application.documents.get("targets"),
        plans_key=application.renewed_key("plans"),
        release_key=application.renewed_key("release"),
        # Snapshot and timestamp name the versions of root and targets, so that they are signed again with either.
        online_key=application.key("online"),
        now=now_utc(),
    )
    # The folder in force is unchanged until the commit: the log gets the keys that differ between the two.
    before = Repository(application.federation.tuf)
    application.log_entries(list(key_changes(before, application.repository)))


def _start_plan(application: _Application, plan_id: str) -> None:
    """Sign the list of the plan's files, and complete the bundle for the silos."""
    federation = application.federation
    # Checked when the plan was drafted too, but holders may have signed it days later.
    check_replaceable(federation)
    bundle = application.change.put(f"plans/{plan_id}/bundle")
    plan = sign_plan_files(
        federation,
        application.change,
        application.repository,
        bundle / "targets" / plan_id,
        application.documents["targets"],
        application.key,
    )
    check_still_carried(federation, plan)
    check_cards_unchanged(federation, plan, application.repository.delegates().silos)
    application.repository.export_bundle(bundle)
