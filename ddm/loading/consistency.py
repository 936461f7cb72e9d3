"""Whether the signed documents of a release agree with each other; rules only, nothing is read.

The signatures were verified before: each document is what its signer wrote. But the publisher's manifest repeats what
silos signed, and a dishonest publisher could repeat it wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm.errors import DigestError, ReplayError, TrustError
from ddm.loading.earlier_plans import check_origins
from ddm.protocol.base import File
from ddm.protocol.carried import CarriedSilo
from ddm.protocol.growth import check_consent, standing_of
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedSilo
from ddm.protocol.partition import SiloClusterPartition
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, class_counts_path, submission_path
from ddm.protocol.weight_privacy import DpSgdPrivacy
from ddm.trust.model_signature import MODEL_SIGNATURE_NAME
from ddm.trust.paths import LOG_NAMES, PLAN_LOG_NAMES
from ddm.trust.verify import VerifiedRelease

# For the rounding of sums in another order.
PRIOR_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ReleaseDocuments:
    """The parsed documents of a release.

    Attributes:
        plan: the plan.
        manifest: the manifest.
        submissions: each silo's document, by silo id.
        earlier_plans: the plans from which experts are carried over, by id.
    """

    plan: Plan
    manifest: Manifest
    submissions: Mapping[str, Submission | Island]
    earlier_plans: Mapping[str, Plan]


def check_documents_agree(verified: VerifiedRelease, documents: ReleaseDocuments) -> None:
    """Check that the documents name each other, and that every file that they list is signed as listed.

    Args:
        verified: the signed files.
        documents: parsed from them.

    Raises:
        FederationError: the plan, or what a silo signed, is of another federation.
        ReplayError: signed documents of different plans or silos.
        TrustError: the manifest contradicts what a silo signed, or what the plan says.
        RoleError: a silo signs with the role of another plan.
        DigestError: a listed file is not signed as listed, or a signed file is not listed.
    """
    plan = documents.plan
    manifest = documents.manifest
    _check_plan(verified, plan, manifest)
    _check_silos(verified, plan, manifest)
    check_origins(plan, verified.origins)
    _check_submissions(verified, documents)
    for silo in manifest.silos:
        submission = documents.submissions[silo.silo_id]
        _check_claims(silo, submission)
        _check_standing(silo, documents)
        _check_units(plan, silo, submission)
        _check_class_counts(verified, plan, silo.silo_id, submission)
        _check_experts(manifest, silo.silo_id, submission)
    _check_priors(documents)
    _check_files(verified, plan, manifest)
    _check_unread_files(verified, manifest)


def _check_plan(verified: VerifiedRelease, plan: Plan, manifest: Manifest) -> None:
    # The plan's name for its federation is also that of the manifest, which names the plan by its digest.
    plan.check_federation(verified.root_fingerprint, "plan.json")
    # The folder name comes from the metadata: documents of another plan may have been put under it (replay).
    for subject, plan_id in (("plan.json", plan.plan_id), ("manifest.json", manifest.plan_id)):
        if plan_id != verified.plan_id:
            raise ReplayError(subject, expected=f"plan {verified.plan_id}", got=plan_id)
    plan_digest = verified.files["plan.json"].digest
    if manifest.plan_digest != plan_digest:
        raise ReplayError(
            "manifest.json", expected=f"plan digest {plan_digest}", got=manifest.plan_digest
        )
    # Silos sent their experts for this licence, which a publisher must not change afterwards.
    if manifest.licence != plan.licence:
        raise TrustError(
            "manifest.json, licence",
            expected=f"{plan.licence}, as the plan states",
            got=manifest.licence,
        )
    # Readers of the manifest alone must learn whose images the experts began with.
    if manifest.base != plan.base:
        raise TrustError(
            "manifest.json, base",
            expected="what the plan states",
            got="another base",
        )


def _check_silos(verified: VerifiedRelease, plan: Plan, manifest: Manifest) -> None:
    """Check that each silo of the plan is published, missing or withdrawn, and that the published ones have signed."""
    # A publisher could leave a silo out without saying so: the three lists must name each silo of the plan.
    published_keys = {silo.silo_id: silo.key_fingerprint for silo in manifest.silos}
    listed = sorted([*published_keys, *manifest.missing_silos, *manifest.withdrawn_silos])
    if listed != list(plan.members):
        members = ", ".join(plan.members)[:200]
        raise TrustError(
            "manifest.json, silos",
            expected=f"each silo of the plan once, as published, missing or withdrawn: {members}",
            got=", ".join(listed)[:200] or "no silos",
        )
    # Readers pin and compare the fingerprints in the manifest, so that they must be those of the keys that signed.
    for silo_id in sorted(published_keys.keys() | verified.silo_keys.keys()):
        signing_key = verified.silo_keys.get(silo_id, "no key")
        published_key = published_keys.get(silo_id, "no key")
        if published_key != signing_key:
            raise TrustError(
                f"manifest.json, silo {silo_id}, key_fingerprint",
                expected=f"{signing_key[:16]}, of the key that signed",
                got=published_key[:16],
            )


def _check_submissions(verified: VerifiedRelease, documents: ReleaseDocuments) -> None:
    """Check that each silo's document is of this silo, and of this plan or the one that it is carried from."""
    plan = documents.plan
    plan_digest = verified.files["plan.json"].digest
    # A carried silo signed for an earlier plan; every other silo must have signed for this one.
    carried_by_silo = {carried.silo_id: carried for carried in plan.carried}
    for silo_id, submission in documents.submissions.items():
        submission.check_federation(verified.root_fingerprint, f"submission of {silo_id}")
        if silo_id in carried_by_silo:
            _check_carried(verified, carried_by_silo[silo_id], submission)
            continue
        named = (submission.silo_id, submission.plan_id, submission.plan_digest)
        if named != (silo_id, plan.plan_id, plan_digest):
            raise ReplayError(
                f"submission of {silo_id}",
                expected=f"silo {silo_id} and plan {plan.plan_id} of digest {plan_digest[:16]}...",
                got=f"silo {submission.silo_id} and plan {submission.plan_id} "
                f"of digest {submission.plan_digest[:16]}...",
            )


def _check_carried(
    verified: VerifiedRelease, carried: CarriedSilo, submission: Submission | Island
) -> None:
    """Check that a carried silo's document is the one that the plan names, and that its silo consents."""
    path = submission_path(carried.silo_id)
    digest = verified.files[path].digest
    if digest != carried.submission_digest:
        raise ReplayError(
            path,
            expected=f"sha256 {carried.submission_digest[:16]}..., the submission that the plan carries",
            got=f"sha256 {digest[:16]}...",
        )
    if not isinstance(submission, Submission):
        raise ReplayError(
            path, expected="the submission of a silo", got="an island, which no plan carries over"
        )
    check_consent(carried, submission)


def _check_claims(silo: PublishedSilo, submission: Submission | Island) -> None:
    """Check that what the manifest repeats of a silo's submission is what the silo signed."""
    # An island claims no guarantee.
    signed: dict[str, float | str | None]
    signed = {"epsilon": None, "delta": None, "audit": "none", "isolation": "none"}
    if isinstance(submission, Submission):
        signed = {
            "epsilon": submission.spent.epsilon,
            "delta": submission.spent.delta,
            "audit": submission.audit.verdict,
            "isolation": submission.isolation,
        }
    # A publisher could claim a smaller epsilon or a better audit than the silo signed.
    for name, value in signed.items():
        claimed = getattr(silo, name)
        if claimed != value:
            raise TrustError(
                f"manifest.json, silo {silo.silo_id}, {name}",
                expected=f"{value}, as the silo signed",
                got=f"{claimed}",
            )


def _check_standing(silo: PublishedSilo, documents: ReleaseDocuments) -> None:
    standing = standing_of(documents.plan, documents.earlier_plans, silo.silo_id)
    if silo.standing != standing:
        raise TrustError(
            f"manifest.json, silo {silo.silo_id}, standing", expected=standing, got=silo.standing
        )


def _check_units(plan: Plan, silo: PublishedSilo, submission: Submission | Island) -> None:
    """Check that a silo counts as what it signed, or as less with a reason, and never as more than was agreed."""
    subject = f"manifest.json, silo {silo.silo_id}, units"
    stated = submission.num_units
    agreed = plan.agreed[silo.silo_id].units(plan.statistics.unit)
    # A larger number of units would give the silo a larger prior, and its expert more of the samples.
    max_units = min(stated, agreed)
    if silo.units > max_units:
        raise TrustError(
            subject,
            expected=f"at most {max_units}, of {stated} that the silo stated and {agreed} that were agreed",
            got=f"{silo.units}",
        )
    # A lower number takes influence from a silo, so that readers must see why.
    is_lowered = silo.units < stated
    has_reason = silo.units_reason is not None
    if is_lowered != has_reason:
        got = f"{silo.units} without a reason"
        if has_reason:
            got = f"{silo.units} with a reason"
        raise TrustError(
            subject,
            expected=f"{stated}, as the silo stated, or less with a reason",
            got=got,
        )


def _check_class_counts(
    verified: VerifiedRelease, plan: Plan, silo_id: str, submission: Submission | Island
) -> None:
    """Check that a silo's class counts, from which readers compute who holds a class, are those that it signed."""
    if plan.statistics.class_counts is None:
        return
    name = class_counts_path(silo_id)
    file = submission.class_counts
    if file is None:
        raise TrustError(
            name,
            expected=f"class_counts in the submission of {silo_id}, as the plan asks",
            got="a submission without them",
        )
    if not _is_signed(verified, name, file):
        raise TrustError(
            name,
            expected=f"{_describe(file.bytes, file.digest)}, as the silo signed",
            got=_describe_signed(verified, name),
        )


def _check_experts(manifest: Manifest, silo_id: str, submission: Submission | Island) -> None:
    """Check that the manifest lists a silo's experts as the silo signed them."""
    published = [expert for expert in manifest.experts if expert.silo_id == silo_id]
    # Only a guarantee that the silo itself signed may be published.
    signed_privacy = {
        expert.expert_id: expert.privacy
        for expert in submission.experts
        if isinstance(expert.privacy, DpSgdPrivacy)
    }
    for expert in published:
        signed = signed_privacy.get(expert.expert_id)
        if expert.privacy != signed:
            raise TrustError(
                f"manifest.json, expert {expert.expert_id}, privacy",
                expected=f"{signed or 'no guarantee'}, as the silo signed",
                got=f"{expert.privacy or 'no guarantee'}",
            )

    # As sets, since the order of experts is the publisher's choice: it is the router's class order.
    published_files = {(expert.expert_id, expert.cluster, expert.file) for expert in published}
    signed_files = {
        (expert.expert_id, expert.cluster, expert.file) for expert in submission.experts
    }
    if published_files != signed_files:
        signed_ids = ", ".join(sorted(expert.expert_id for expert in submission.experts))[:200]
        got = ", ".join(sorted(expert.expert_id for expert in published))[:200] or "no experts"
        if got == signed_ids:
            got = "the same experts with other clusters or files"
        raise TrustError(
            f"manifest.json, silo {silo_id}, experts",
            expected=f"{signed_ids}, with clusters and files as the silo signed",
            got=got,
        )


def _check_priors(documents: ReleaseDocuments) -> None:
    """Check that the priors of each silo's experts sum to its share of all counted units.

    With a partition by clusters the division of a silo's share among its experts follows from its noised histogram,
    which is not published, and is not checked. With other partitions the shares of its experts are equal.
    """
    manifest = documents.manifest
    # The priors decide which expert a sample follows; a publisher could favour one silo.
    total_units = sum(silo.units for silo in manifest.silos)
    has_equal_shares = not isinstance(documents.plan.partition, SiloClusterPartition)
    for silo in manifest.silos:
        experts = [expert for expert in manifest.experts if expert.silo_id == silo.silo_id]
        share = silo.units / total_units
        total_prior = sum(expert.prior for expert in experts)
        _check_prior(f"silo {silo.silo_id}, priors", share, total_prior)
        if has_equal_shares:
            for expert in experts:
                subject = f"expert {expert.expert_id}, prior"
                _check_prior(subject, share / len(experts), expert.prior)


def _check_prior(subject: str, share: float, prior: float) -> None:
    if abs(prior - share) > PRIOR_TOLERANCE:
        raise TrustError(
            f"manifest.json, {subject}",
            expected=f"{share:.9f}, its share of all units",
            got=f"{prior:.9f}",
        )


def _check_files(verified: VerifiedRelease, plan: Plan, manifest: Manifest) -> None:
    """Check that exactly the listed files are signed, as they are listed."""
    # Every file is named by exactly one document, with the digest that the metadata sign.
    listed = [*plan.files, *manifest.files, manifest.router.file]
    listed += [silo.submission for silo in manifest.silos]
    listed += [expert.file for expert in manifest.experts]
    for file in listed:
        if not _is_signed(verified, file.path, file):
            described = _describe(file.bytes, file.digest)
            raise DigestError(
                file.path,
                expected=f"{described}, as manifest.json or plan.json lists",
                got=_describe_signed(verified, file.path),
            )
    # These were made after the manifest, which they are about; the plan's proofs are not part of it either.
    unlisted_by_design = {"manifest.json", MODEL_SIGNATURE_NAME, *LOG_NAMES, *PLAN_LOG_NAMES}
    extra = set(verified.files) - {file.path for file in listed} - unlisted_by_design
    if extra:
        raise DigestError(
            min(extra),
            expected="a file that the manifest lists",
            got=f"{len(extra)} files that it does not list",
        )


def _check_unread_files(verified: VerifiedRelease, manifest: Manifest) -> None:
    """Check that only experts of the manifest were left unread, since only these are read and checked later."""
    # `experts_later` leaves experts to `load_expert`, which checks their digests; no other file may escape so.
    unread = {name for name, file in verified.files.items() if not file.digest_checked}
    unread -= {expert.file.path for expert in manifest.experts}
    if unread:
        raise DigestError(
            min(unread),
            expected="an expert that the manifest lists",
            got="an unread file that it does not list",
        )


def _is_signed(verified: VerifiedRelease, name: str, file: File) -> bool:
    """Whether a file is signed under this name with the size and the digest that a document lists."""
    signed = verified.files.get(name)
    return signed is not None and (signed.bytes, signed.digest) == (file.bytes, file.digest)


def _describe_signed(verified: VerifiedRelease, name: str) -> str:
    signed = verified.files.get(name)
    if signed is None:
        return "no signed file of this name"
    return _describe(signed.bytes, signed.digest)


def _describe(num_bytes: int, digest: str) -> str:
    return f"{num_bytes} bytes, sha256 {digest[:16]}..."
