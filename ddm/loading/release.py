"""Verifies a published release and reads its documents, signed and consistent with each other. Imports no torch.

The folder may be on a share of somebody else's and change at any time, so a digest is checked again on the very bytes
that are then parsed.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddm.errors import DigestError, MissingFileError, RootError
from ddm.fetching.hosted import HostedRelease, OnProgress, no_progress
from ddm.io.files import read_bounded
from ddm.loading.consistency import ReleaseDocuments, check_documents_agree
from ddm.loading.earlier_plans import read_earlier_plans
from ddm.loading.log import LogRequirements, LogView, entry_of, read_log
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, is_expert_path
from ddm.trust.log.checkpoint_store import CheckpointStore
from ddm.trust.log.proof import MAX_CONSISTENCY_BYTES, MAX_PROOF_BYTES
from ddm.trust.model_signature import (
    MAX_MODEL_SIGNATURE_BYTES,
    MODEL_SIGNATURE_NAME,
    check_model_signature,
)
from ddm.trust.paths import CONSISTENCY_NAME, MANIFEST_PROOF_NAME
from ddm.trust.verify import KnownSiloKeys, PostponedFiles, VerifiedRelease, verify_release

# A root names some keys and roles; anything larger is not one.
MAX_ROOT_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """A verified release and its documents; no tensor has been read yet.

    Attributes:
        verified: the result of verifying the signatures.
        plan: the plan.
        manifest: the manifest.
        submissions: each silo's document, by silo id.
        log: the federation's log, in which the manifest is entered.
        folder: holds `plan.json` and the rest.
        earlier_plans: the plans from which experts are carried over, by id.
        hosted: fetches the experts that are not in the folder yet; None where all of them are.
    """

    verified: VerifiedRelease
    plan: Plan
    manifest: Manifest
    submissions: Mapping[str, Submission | Island]
    log: LogView
    folder: Path
    earlier_plans: Mapping[str, Plan] = field(default_factory=dict)
    hosted: HostedRelease | None = None

    def fetch_experts(
        self, numbers: Iterable[int] | None = None, on_progress: OnProgress = no_progress
    ) -> None:
        """Fetch the experts of a release on a host that are not here yet; other releases have all of them.

        Args:
            numbers: their places in the manifest; all experts where omitted.
            on_progress: called with the bytes that are there, and those that will be.

        Raises:
            TrustError, TransportError, DiskError: see `ddm.fetching.hosted.HostedRelease.fetch_experts`.
        """
        if self.hosted is None:
            return
        paths = None
        if numbers is not None:
            paths = [self._path_below_targets(number) for number in numbers]
        self.hosted.fetch_experts(paths, on_progress)

    def _path_below_targets(self, number: int) -> str:
        expert = self.manifest.experts[number]
        # A carried expert is published under the plan for which its silo signed it.
        return f"{self.plan.origin(expert.silo_id)}/{expert.file.path}"

    @property
    def manifest_digest(self) -> str:
        """The digest of its manifest, which lists every file: it identifies the release."""
        return self.verified.files["manifest.json"].digest


def read_root(path: Path) -> bytes:
    """Read the pinned root of trust.

    Raises:
        MissingFileError: no file at `path`.
        RootError: it is empty or too large.
    """
    if not path.is_file():
        got = "nothing there"
        if path.is_dir():
            got = "a folder"
        raise MissingFileError(
            str(path),
            expected="the federation's 1.root.json, received out of band",
            got=got,
            remedy="Ask the federation's operator for 1.root.json and compare its fingerprint by another way.",
        )
    # The size comes first: a wrong path, such as one of an expert, would be read into memory whole.
    size = path.stat().st_size
    data = b""
    if size <= MAX_ROOT_BYTES:
        data = path.read_bytes()
    if not data:
        raise RootError(
            str(path), expected=f"a root of 1 to {MAX_ROOT_BYTES} bytes", got=f"{size} bytes"
        )
    return data


def open_release(
    place: Path | HostedRelease,
    *,
    root: Path | bytes,
    state: Path | None,
    silo_keys: Mapping[str, str] | None = None,
    accepted_keys: Mapping[str, str] | None = None,
    archived: bool = False,
    experts_later: bool = False,
    log_requirements: LogRequirements = LogRequirements(),
) -> Release:
    """Verify a release and read its documents.

    Args:
        place: the published folder; or a release on a host, which must have been opened with the same root.
        root: the pinned 1.root.json.
        state: where versions, silos' keys and the log seen before are remembered, to detect rollbacks, changed keys and
            a second history; None remembers nothing.
        silo_keys: fingerprints to pin, by silo id.
        accepted_keys: fingerprints that may take the place of remembered ones, by silo id.
        archived: accept an expired timestamp.
        experts_later: do not read the experts yet; `load_expert` checks each one's digest on the bytes that it loads.
            If the release is on a host, they are not fetched yet either: see `Release.hosted`.
        log_requirements: what the reader demands of the log; nothing is remembered of a release that does not fulfil
            it.

    Raises:
        TrustError: a signature, digest, version, role or path is wrong, the manifest contradicts what a silo signed, or
            too few witnesses cosigned.
        SplitViewError: the federation's log is not the one seen before, or not the one that others were shown.
        DocumentError: a document does not parse.
        ReplayError: signed documents of different plans or silos.
    """
    hosted: HostedRelease | None = None
    if isinstance(place, HostedRelease):
        hosted = place
        folder = place.folder
        if not experts_later:
            place.fetch_experts()
    else:
        folder = place
    if not folder.is_dir():
        raise MissingFileError(str(folder), expected="a release folder", got="nothing there")
    if isinstance(root, bytes):
        root_bytes = root
    else:
        root_bytes = read_root(root)
    log_memory = None
    log_state = None
    if state is not None:
        log_memory = CheckpointStore(state / sha256_hex(root_bytes))
        log_state = log_memory.folder
    releases: list[Release] = []

    # This runs after the signatures are verified and before anything is remembered: a release whose documents or log
    # are wrong must not move the remembered versions and keys forward.
    def read_documents(verified: VerifiedRelease) -> None:
        release = _read_documents(folder, verified)
        if log_memory is not None:
            log_memory.check(release.log.view, MANIFEST_PROOF_NAME)
        release.log.require(log_requirements, log_state)
        releases.append(release)

    verified = verify_release(
        folder,
        root_bytes,
        state=state,
        known_keys=KnownSiloKeys(silo_keys or {}, accepted_keys or {}),
        archived=archived,
        # To hash the experts here and again when they are loaded takes three times as long (docs/adr/0015).
        later=PostponedFiles(
            lambda name: experts_later and is_expert_path(name), may_be_absent=hosted is not None
        ),
        before_recording=read_documents,
    )
    release = replace(releases[0], verified=verified, hosted=hosted)
    # Only now: of a release that was refused, nothing is remembered.
    if log_memory is not None:
        log_memory.record(release.log.view, MANIFEST_PROOF_NAME)
    _log.debug(
        "verified %d files of %s, version %d",
        len(release.verified.files),
        release.plan.plan_id,
        release.manifest.version,
    )
    return release


def _read_documents(folder: Path, verified: VerifiedRelease) -> Release:
    """Read the documents, which must be consistent with each other, and be entered in the federation's log."""
    plan = Plan.parse(_read(verified, "plan.json"), subject="plan.json")
    encoded_manifest = _read(verified, "manifest.json")
    manifest = Manifest.parse(encoded_manifest, subject="manifest.json")
    # The plan says which kind of document each member signed; the manifest cannot choose.
    document_class: type[Submission | Island]
    if plan.statistics.private:
        document_class = Submission
    else:
        document_class = Island
    submissions = {}
    for silo in manifest.silos:
        path = silo.submission.path
        submissions[silo.silo_id] = document_class.parse(_read(verified, path), subject=path)
    earlier_plans = read_earlier_plans(plan, lambda file: _read(verified, file.path))

    # The documents are signed each by itself; only together do they say that nothing was exchanged.
    check_documents_agree(verified, ReleaseDocuments(plan, manifest, submissions, earlier_plans))
    _check_model_signature(verified)
    log = read_log(
        verified.log_keys,
        _read(verified, MANIFEST_PROOF_NAME, MAX_PROOF_BYTES),
        _read(verified, CONSISTENCY_NAME, MAX_CONSISTENCY_BYTES),
        entry_of(manifest, sha256_hex(encoded_manifest)),
        MANIFEST_PROOF_NAME,
    )
    return Release(
        verified=verified,
        plan=plan,
        manifest=manifest,
        submissions=submissions,
        log=log,
        folder=folder / "targets" / verified.plan_id,
        earlier_plans=earlier_plans,
    )


def _read(verified: VerifiedRelease, name: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a signed file, whose digest is checked once more on the bytes that are returned."""
    if name not in verified.files:
        raise DigestError(
            name,
            expected="a signed file of this name",
            got="no such file among the signed ones",
            remedy="The release is incomplete. Fetch it again from the publisher.",
        )
    file = verified.files[name]
    data = read_bounded(file.path, limit, subject=name)
    digest = sha256_hex(data)
    if digest != file.digest:
        raise DigestError(
            name,
            expected=f"sha256 {file.digest[:16]}..., as verified before",
            got=f"sha256 {digest[:16]}...",
            remedy="The file changed while it was read. Copy the release to a folder that nobody writes to, "
            "and try again.",
        )
    return data


def _check_model_signature(verified: VerifiedRelease) -> None:
    """Check that `model.sig`, if there is one, covers what TUF signs in the plan's folder; TUF knows no key of it.

    The files of carried silos are beside that folder.
    """
    if MODEL_SIGNATURE_NAME not in verified.files:
        return
    data = _read(verified, MODEL_SIGNATURE_NAME, MAX_MODEL_SIGNATURE_BYTES)
    folder = verified.files["plan.json"].path.parent
    digests = {}
    for name, file in verified.files.items():
        if name != MODEL_SIGNATURE_NAME and file.path.is_relative_to(folder):
            digests[name] = file.digest
    check_model_signature(data, verified.plan_id, digests)
