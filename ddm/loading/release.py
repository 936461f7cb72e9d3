"""Verifies a published release and reads its documents, signed and consistent with each other. Imports no torch.

The folder may be on a share of somebody else's and change at any time, so a digest is checked again on the very bytes
that are then parsed.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ddm.errors import DigestError, MissingFileError, ReplayError, RootError, TrustError
from ddm.io.files import read_bounded
from ddm.loading.log import LogView, entry_of, read_log
from ddm.loading.plan_documents import check_origins, read_earlier
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.carried import Carried
from ddm.protocol.growth import check_consent, standing_of
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedSilo, Standing
from ddm.protocol.partition import SiloClusterPartition
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, class_counts_path, is_expert_path, submission_path
from ddm.protocol.weight_privacy import DpSgdPrivacy
from ddm.trust.log.checkpoint_store import CheckpointStore
from ddm.trust.log.proof import MAX_CONSISTENCY_BYTES, MAX_PROOF_BYTES
from ddm.trust.log.witness import Witnesses
from ddm.trust.model_signature import (
    MAX_MODEL_SIGNATURE_BYTES,
    MODEL_SIGNATURE_NAME,
    check_model_signature,
)
from ddm.trust.paths import CONSISTENCY_NAME, LOG_NAMES, MANIFEST_PROOF_NAME, PLAN_LOG_NAMES
from ddm.trust.verify import VerifiedRelease, verify_release

MAX_ROOT_BYTES = 1 << 20
PRIOR_TOLERANCE = 1e-9
_NO_CHECKPOINTS: Mapping[str, bytes] = MappingProxyType({})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """A verified release and its documents; no tensor has been read yet.

    Attributes:
        verified: the result of verifying the signatures.
        plan: the plan.
        manifest: the manifest.
        submissions: each silo's document, by silo id.
        log: the federation's log, in which the manifest stands.
        folder: holds `plan.json` and the rest.
        earlier: the plans from which experts are carried over, by id.
    """

    verified: VerifiedRelease
    plan: Plan
    manifest: Manifest
    submissions: Mapping[str, Submission | Island]
    log: LogView
    folder: Path
    earlier: Mapping[str, Plan] = field(default_factory=dict)

    def standing(self, silo_id: str) -> Standing:
        """Return what a published silo is in this plan; see `ddm.protocol.growth.standing_of`."""
        return standing_of(self.plan, self.earlier, silo_id)

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
        raise MissingFileError(
            str(path),
            expected="the federation's 1.root.json, received out of band",
            got="a folder" if path.is_dir() else "nothing there",
            remedy="Ask the federation's operator for 1.root.json and compare its fingerprint by another way.",
        )
    size = path.stat().st_size
    data = path.read_bytes() if size <= MAX_ROOT_BYTES else b""
    if not data:
        raise RootError(
            str(path), expected=f"a root of 1 to {MAX_ROOT_BYTES} bytes", got=f"{size} bytes"
        )
    return data


def open_release(
    folder: Path,
    *,
    root: Path | bytes,
    state: Path | None,
    silo_keys: Mapping[str, str] | None = None,
    accepted_keys: Mapping[str, str] | None = None,
    archived: bool = False,
    experts_later: bool = False,
    checkpoints: Mapping[str, bytes] = _NO_CHECKPOINTS,
    witnesses: Witnesses | None = None,
) -> Release:
    """Verify a release and read its documents.

    Args:
        folder: the published folder.
        root: the pinned 1.root.json.
        state: where versions, silos' keys and the log seen before are remembered, to detect rollbacks, changed keys and
            a second history; None
            remembers nothing.
        silo_keys: fingerprints to pin, by silo id.
        accepted_keys: fingerprints that may take the place of remembered ones, by silo id.
        archived: accept an expired timestamp.
        experts_later: do not read the experts yet; `load_expert` checks each one's digest on the bytes that it loads.
        checkpoints: checkpoints of the log that others were shown, by what to call them; nothing is remembered of a
            release whose log is not theirs.
        witnesses: those who must have cosigned the release's checkpoint, on one of `checkpoints`.

    Raises:
        TrustError: a signature, digest, version, role or path is wrong, the manifest contradicts what a silo signed, or
            too few witnesses cosigned.
        SplitViewError: the federation's log is not the one seen before, or not the one that others were shown.
        DocumentError: a document does not parse.
        ReplayError: signed documents of different plans or silos.
    """
    if not folder.is_dir():
        raise MissingFileError(str(folder), expected="a release folder", got="nothing there")
    pinned = root if isinstance(root, bytes) else read_root(root)
    memory = CheckpointStore(state / sha256_hex(pinned)) if state else None
    read: list[Release] = []

    def read_documents(verified: VerifiedRelease) -> None:
        release = _read_documents(folder, verified)
        if memory:
            memory.check(release.log.view, MANIFEST_PROOF_NAME)
        for subject, checkpoint in checkpoints.items():
            release.log.compare(checkpoint, subject, memory.folder if memory else None)
        if witnesses:
            release.log.check_witnessed(witnesses, checkpoints)
        read.append(release)

    verified = verify_release(
        folder,
        pinned,
        state=state,
        silo_keys=silo_keys or {},
        accepted_keys=accepted_keys or {},
        archived=archived,
        later=lambda name: experts_later and is_expert_path(name),
        before_recording=read_documents,
    )
    release = replace(read[0], verified=verified)
    if memory:
        memory.record(release.log.view, MANIFEST_PROOF_NAME)
    _log.debug(
        "verified %d files of %s, version %d",
        len(release.verified.files),
        release.plan.plan_id,
        release.manifest.version,
    )
    return release


def _read_documents(folder: Path, verified: VerifiedRelease) -> Release:
    """Read the documents, which must be consistent with each other, and stand in the federation's log."""
    plan = Plan.parse(_read(verified, "plan.json"), subject="plan.json")
    encoded = _read(verified, "manifest.json")
    manifest = Manifest.parse(encoded, subject="manifest.json")
    kind: type[Submission | Island] = Submission if plan.statistics.private else Island
    submissions = {
        silo.silo_id: kind.parse(
            _read(verified, silo.submission.path), subject=silo.submission.path
        )
        for silo in manifest.silos
    }
    earlier = read_earlier(plan, lambda file: _read(verified, file.path))
    _check_together(verified, plan, earlier, manifest, submissions)
    log = read_log(
        verified.log_keys,
        _read(verified, MANIFEST_PROOF_NAME, MAX_PROOF_BYTES),
        _read(verified, CONSISTENCY_NAME, MAX_CONSISTENCY_BYTES),
        entry_of(manifest, sha256_hex(encoded)),
        MANIFEST_PROOF_NAME,
    )
    return Release(
        verified=verified,
        plan=plan,
        manifest=manifest,
        submissions=submissions,
        log=log,
        folder=folder / "targets" / verified.plan_id,
        earlier=earlier,
    )


def _read(verified: VerifiedRelease, name: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    if name not in verified.files:
        got, remedy = (
            "no such file among the signed ones",
            "The release is incomplete. Fetch it again from the publisher.",
        )
        raise DigestError(name, expected="a signed file of this name", got=got, remedy=remedy)
    data = read_bounded(verified.files[name].path, limit, subject=name)
    if (found := sha256_hex(data)) != (wanted := verified.files[name].digest):
        remedy = (
            "The file changed while it was read. Copy the release "
            "to a folder that nobody writes to, and try again."
        )
        expected = f"sha256 {wanted[:16]}..., as verified before"
        raise DigestError(name, expected=expected, got=f"sha256 {found[:16]}...", remedy=remedy)
    return data


def _check_together(
    verified: VerifiedRelease,
    plan: Plan,
    earlier: Mapping[str, Plan],
    manifest: Manifest,
    submissions: Mapping[str, Submission | Island],
) -> None:
    """Check that the signed documents name each other, and that every file that they list is signed as listed."""
    plan_digest = verified.files["plan.json"].digest
    for subject, plan_id in (("plan.json", plan.plan_id), ("manifest.json", manifest.plan_id)):
        if plan_id != verified.plan_id:
            raise ReplayError(subject, expected=f"plan {verified.plan_id}", got=plan_id)
    if manifest.plan_digest != plan_digest:
        raise ReplayError(
            "manifest.json", expected=f"plan digest {plan_digest}", got=manifest.plan_digest
        )
    _check_silos(verified, plan, manifest)
    check_origins(plan, verified.origins)
    carried = {each.silo_id: each for each in plan.carried}
    for silo_id, submission in submissions.items():
        if silo_id in carried:
            _check_carried(verified, carried[silo_id], submission)
            continue
        got = (submission.silo_id, submission.plan_id, submission.plan_digest)
        if got != (silo_id, plan.plan_id, plan_digest):
            named = (
                f"silo {submission.silo_id} and plan {submission.plan_id} "
                f"of digest {submission.plan_digest[:16]}..."
            )
            expected = f"silo {silo_id} and plan {plan.plan_id} of digest {plan_digest[:16]}..."
            raise ReplayError(f"submission of {silo_id}", expected=expected, got=named)
    for silo in manifest.silos:
        _check_claims(silo, submissions[silo.silo_id])
        if silo.standing != (standing := standing_of(plan, earlier, silo.silo_id)):
            raise TrustError(
                f"manifest.json, silo {silo.silo_id}, standing",
                expected=standing,
                got=silo.standing,
            )
        _check_units(plan, silo, submissions[silo.silo_id])
        _check_class_counts(verified, plan, silo.silo_id, submissions[silo.silo_id])
    _check_experts(plan, manifest, submissions)
    _check_files(verified, plan, manifest)
    _check_read(verified, manifest)
    _check_model_signature(verified)


def _check_silos(verified: VerifiedRelease, plan: Plan, manifest: Manifest) -> None:
    """Check that each silo of the plan is published, missing or withdrawn, and that the published ones have signed."""
    published = {silo.silo_id: silo.key_fingerprint for silo in manifest.silos}
    listed = sorted([*published, *manifest.missing_silos, *manifest.withdrawn_silos])
    if listed != list(plan.members):
        expected = f"each silo of the plan once, as published, missing or withdrawn: {', '.join(plan.members)[:200]}"
        raise TrustError(
            "manifest.json, silos", expected=expected, got=", ".join(listed)[:200] or "no silos"
        )
    for silo_id in sorted(published.keys() | verified.silo_keys.keys()):
        if published.get(silo_id) != verified.silo_keys.get(silo_id):
            signed, named = (
                keys.get(silo_id, "no key")[:16] for keys in (verified.silo_keys, published)
            )
            subject = f"manifest.json, silo {silo_id}, key_fingerprint"
            raise TrustError(subject, expected=f"{signed}, of the key that signed", got=named)


def _check_carried(
    verified: VerifiedRelease, carried: Carried, submission: Submission | Island
) -> None:
    """Check that a carried silo's document is the one that the plan names, and that its silo consents."""
    path = submission_path(carried.silo_id)
    if (found := verified.files[path].digest) != carried.submission_digest:
        expected = (
            f"sha256 {carried.submission_digest[:16]}..., the submission that the plan carries"
        )
        raise ReplayError(path, expected=expected, got=f"sha256 {found[:16]}...")
    if not isinstance(submission, Submission):
        raise ReplayError(
            path, expected="the submission of a silo", got="an island, which no plan carries over"
        )
    check_consent(carried, submission)


def _check_claims(silo: PublishedSilo, submission: Submission | Island) -> None:
    """Check that what the manifest repeats of a silo's submission is what the silo signed."""
    # an island claims no guarantee
    stated: tuple[float | str | None, ...] = (
        None,
        None,
        "none",
        "none",
    )
    if isinstance(submission, Submission):
        spent = submission.spent
        stated = (spent.epsilon, spent.delta, submission.audit.verdict, submission.isolation)
    claims = zip(("epsilon", "delta", "audit", "isolation"), stated, strict=True)
    for (name, signed), claimed in zip(
        claims, (silo.epsilon, silo.delta, silo.audit, silo.isolation), strict=True
    ):
        if claimed != signed:
            subject = f"manifest.json, silo {silo.silo_id}, {name}"
            raise TrustError(subject, expected=f"{signed}, as the silo signed", got=f"{claimed}")


def _check_units(plan: Plan, silo: PublishedSilo, submission: Submission | Island) -> None:
    """Check that a silo counts as what it signed, or as less with a reason, and never as more than was agreed."""
    claimed, agreed = submission.num_units, plan.agreed[silo.silo_id].units(plan.statistics.unit)
    subject, most = f"manifest.json, silo {silo.silo_id}, units", min(claimed, agreed)
    if silo.units > most:
        expected = (
            f"at most {most}, of {claimed} that the silo stated and {agreed} that were agreed"
        )
        raise TrustError(subject, expected=expected, got=f"{silo.units}")
    if (silo.units < claimed) != (silo.units_reason is not None):
        got = f"{silo.units} {'with' if silo.units_reason is not None else 'without'} a reason"
        raise TrustError(
            subject, expected=f"{claimed}, as the silo stated, or less with a reason", got=got
        )


def _check_class_counts(
    verified: VerifiedRelease, plan: Plan, silo_id: str, submission: Submission | Island
) -> None:
    """Check that a silo's class counts, from which readers compute who holds a class, are those that it signed."""
    if plan.statistics.class_counts is None:
        return
    name, signed = class_counts_path(silo_id), submission.class_counts
    if signed is None:
        expected = f"class_counts in the submission of {silo_id}, as the plan asks"
        raise TrustError(name, expected=expected, got="a submission without them")
    found = verified.files.get(name)
    if found is None or (found.bytes, found.digest) != (signed.bytes, signed.digest):
        expected = f"{signed.bytes} bytes, sha256 {signed.digest[:16]}..., as the silo signed"
        got = (
            f"{found.bytes} bytes, sha256 {found.digest[:16]}..."
            if found
            else "no signed file of this name"
        )
        raise TrustError(name, expected=expected, got=got)


def _check_experts(
    plan: Plan, manifest: Manifest, submissions: Mapping[str, Submission | Island]
) -> None:
    """Check that the manifest lists the silos' experts, and that each silo's priors sum to its share of counted units.

    With a partition by clusters the division of a silo's share among its experts follows from its noised histogram,
    which is not published, and is not checked. With other partitions the shares of its experts are equal.
    """
    units = {silo.silo_id: silo.units for silo in manifest.silos}
    total = sum(units.values())
    for silo_id, submission in submissions.items():
        published = [expert for expert in manifest.experts if expert.silo_id == silo_id]
        privately = {
            e.expert_id: e.privacy
            for e in submission.experts
            if isinstance(e.privacy, DpSgdPrivacy)
        }
        for each in published:
            if each.privacy != (signed := privately.get(each.expert_id)):
                subject, none = f"manifest.json, expert {each.expert_id}, privacy", "no guarantee"
                raise TrustError(
                    subject,
                    expected=f"{signed or none}, as the silo signed",
                    got=f"{each.privacy or none}",
                )
        if {(e.expert_id, e.cluster, e.file) for e in published} != {
            (e.expert_id, e.cluster, e.file) for e in submission.experts
        }:
            signed_ids = ", ".join(sorted(e.expert_id for e in submission.experts))[:200]
            expected = f"{signed_ids}, with clusters and files as the silo signed"
            got = ", ".join(sorted(e.expert_id for e in published))[:200] or "no experts"
            if got == signed_ids:
                got = "the same experts with other clusters or files"
            raise TrustError(f"manifest.json, silo {silo_id}, experts", expected=expected, got=got)
        share = units[silo_id] / total
        _check_prior(f"silo {silo_id}, priors", share, sum(expert.prior for expert in published))
        if not isinstance(plan.partition, SiloClusterPartition):
            for expert in published:
                _check_prior(
                    f"expert {expert.expert_id}, prior", share / len(published), expert.prior
                )


def _check_prior(subject: str, share: float, prior: float) -> None:
    if abs(prior - share) > PRIOR_TOLERANCE:
        expected = f"{share:.9f}, its share of all units"
        raise TrustError(f"manifest.json, {subject}", expected=expected, got=f"{prior:.9f}")


def _check_files(verified: VerifiedRelease, plan: Plan, manifest: Manifest) -> None:
    listed = [*plan.files, *manifest.files, manifest.router.file]
    listed += [silo.submission for silo in manifest.silos] + [
        expert.file for expert in manifest.experts
    ]
    for file in listed:
        signed = verified.files.get(file.path)
        if signed is None or (signed.bytes, signed.digest) != (file.bytes, file.digest):
            got = (
                f"{signed.bytes} bytes, sha256 {signed.digest[:16]}..."
                if signed
                else "no signed file of this name"
            )
            expected = f"{file.bytes} bytes, sha256 {file.digest[:16]}..., as manifest.json or plan.json lists"
            raise DigestError(file.path, expected=expected, got=got)
    # Made after the manifest, of which they speak; those of the plan are no part of it either.
    beside = {"manifest.json", MODEL_SIGNATURE_NAME, *LOG_NAMES, *PLAN_LOG_NAMES}
    extra = set(verified.files) - {file.path for file in listed} - beside
    if extra:
        raise DigestError(
            min(extra),
            expected="a file that the manifest lists",
            got=f"{len(extra)} that it does not",
        )


def _check_read(verified: VerifiedRelease, manifest: Manifest) -> None:
    """Check that only experts of the manifest were left unread, since only these are read and checked later."""
    unread = {name for name, file in verified.files.items() if not file.digest_checked} - {
        e.file.path for e in manifest.experts
    }
    if unread:
        raise DigestError(
            min(unread),
            expected="an expert that the manifest lists",
            got="an unread file that it does not",
        )


def _check_model_signature(verified: VerifiedRelease) -> None:
    """Check that `model.sig`, if there is one, covers what TUF signs in the plan's folder; TUF knows no key of it.

    The files of carried silos lie beside that folder.
    """
    if MODEL_SIGNATURE_NAME in verified.files:
        data = _read(verified, MODEL_SIGNATURE_NAME, MAX_MODEL_SIGNATURE_BYTES)
        folder = verified.files["plan.json"].path.parent
        within = {
            name: file for name, file in verified.files.items() if file.path.is_relative_to(folder)
        }
        others = {
            name: file.digest for name, file in within.items() if name != MODEL_SIGNATURE_NAME
        }
        check_model_signature(data, verified.plan_id, others)
