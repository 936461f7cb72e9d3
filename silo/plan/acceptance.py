"""Accepts a plan: copies it out of the hostile inbox, verifies it against the pinned root, then reads it."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from ddm.errors import (
    AbsentFileError,
    BusyError,
    DigestError,
    NumericalError,
    PolicyError,
    ReplayError,
    SignatureError,
)
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import move_into_place, read_bounded, staging_folder
from ddm.io.locks import hold_for_reading
from ddm.io.tensors import check_file
from ddm.io.untrusted import read_small
from ddm.loading.earlier_plans import check_origins, read_earlier_plans
from ddm.loading.log import read_log
from ddm.loading.plan import PlanFiles
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.models.adaptation import check_trained
from ddm.protocol.base import MAX_DOCUMENT_BYTES, PLAN_ID_PATTERN, File, sha256_hex
from ddm.protocol.encoder import TimmEncoderSpec
from ddm.protocol.learning import PartialAdaptation
from ddm.protocol.plan import Plan
from ddm.statistics.of_plan import statistics_of
from ddm.trust.keys import PublicKey, group_fingerprint
from ddm.trust.log.checkpoint_store import CheckpointStore
from ddm.trust.log.entries import PlanSigned
from ddm.trust.log.proof import MAX_CONSISTENCY_BYTES, MAX_PROOF_BYTES
from ddm.trust.paths import PLAN_CONSISTENCY_NAME, PLAN_LOG_NAMES, PLAN_PROOF_NAME
from ddm.trust.verify import (
    MAX_METADATA_BYTES,
    VerifiedRelease,
    verify_bundle,
    verify_bundle_metadata,
)
from silo.config import Policy, Site
from silo.plan.attempts import guard_attempt
from silo.plan.own_experts import check_own_experts
from silo.plan.policy import check_plan


@dataclass(frozen=True)
class AcceptedPlan:
    """A verified plan and the place of its files on this site.

    Attributes:
        plan: parsed from the verified bytes.
        digest: sha256 of those bytes; pinned from acceptance on.
        folder: holds `plan.json` and `plan/`.
    """

    plan: Plan
    digest: str
    folder: Path

    def files(self) -> PlanFiles:
        """Load the plan's public tensors."""
        return PlanFiles.load(self.plan, self.folder)


def plan_folder(site: Site, plan_id: str) -> Path:
    """Where the worker keeps its own copy of a plan's bundle."""
    return site.private / "plans" / plan_id


def waiting_plans(site: Site) -> list[str]:
    """List the plans with a complete bundle in the inbox on which this site has never worked, oldest first."""
    plan_ids = []
    for bundle in site.inbox.glob("*/bundle"):
        plan_id = bundle.parent.name
        # The courier names the folders of the inbox, and the name becomes part of paths in `private/`.
        if re.fullmatch(PLAN_ID_PATTERN, plan_id) and not site.work_folder(plan_id).exists():
            plan_ids.append(plan_id)
    return sorted(plan_ids, key=lambda plan_id: bundle_mark(site, plan_id) or (0, 0))


def bundle_mark(site: Site, plan_id: str) -> tuple[int, int] | None:
    """Return what changes when another bundle of a plan arrives; None while there is none.

    The courier may replace a bundle, so a plan that was refused is tried again once this has changed.
    """
    try:
        # Of the link itself if it is one: nothing that the courier writes is followed.
        info = (site.inbox / plan_id / "bundle").lstat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ino


def receive_plan(
    site: Site,
    plan_id: str,
    policy: Policy,
    *,
    silo_id: str,
    key: PublicKey,
    max_bytes: int,
    now: datetime,
    parts: int = 1,
) -> AcceptedPlan:
    """Copy, verify and check one plan; only a plan that passes everything gets its folder.

    Args:
        site: the silo's folder.
        plan_id: the plan's, as its folder in the inbox is called.
        policy: this site's.
        silo_id: this silo.
        key: its signing key, which the plan must name.
        max_bytes: most bytes of the bundle.
        now: the time of acceptance.
        parts: the parts into which this machine divides a batch.

    Raises:
        TrustError: the bundle is not signed as the pinned root demands.
        FormatError: the bundle or a document in it is malformed, or reading it failed in a way that nobody foresaw.
        PolicyError: the plan requires more than this site allows.
        BusyError: the courier holds the bundle just now; it says nothing about the plan.
        OSError: a fault of this machine, such as a full disk.
    """
    source = site.inbox / plan_id / "bundle"
    # The root that came with the invitation, whose fingerprint a person compared; nothing in the inbox replaces it.
    root = site.root_path.read_bytes()
    with (
        _hold(source.parent),
        guard_attempt(site, plan_id),
        staging_folder(plan_folder(site, plan_id)) as part,
    ):
        # Before anything large is copied: what nobody signed costs neither time nor disk.
        targets = verify_bundle_metadata(
            source, root, state=site.private / "trust", now=now
        ).targets
        signed_bytes = MAX_METADATA_BYTES + sum(target.bytes for target in targets.values())
        copy_tree_bounded(source, part, max_bytes=min(max_bytes, signed_bytes))

        # Everything below reads the copy, which the courier cannot change between check and use.
        checkpoints = CheckpointStore(site.private / "trust" / sha256_hex(root))
        verified = verify_bundle(
            part,
            root,
            state=site.private / "trust",
            # Before the versions are remembered: a bundle that the log does not have must not make the genuine one
            # look old.
            before_recording=lambda verified: _check_log(part, verified, checkpoints),
            now=now,
        )
        # The courier could offer a signed plan under another plan's name, and so have it worked on twice.
        if verified.plan_id != plan_id:
            raise ReplayError("plan bundle", expected=plan_id, got=verified.plan_id)
        accepted = _read_plan(site, part, plan_id, verified.files["plan.json"].digest)
        plan = accepted.plan
        _check_files_are_signed(plan, verified)
        # Carried experts are verified by roles of earlier plans; plan and signature must agree on which plan that is.
        check_origins(plan, verified.origins)

        # Rules on the document's numbers come before anything of their size is allocated or opened.
        check_plan(plan, policy, silo_id=silo_id, now=now, parts=parts)
        _check_own_key(plan_id, silo_id, key, verified.silo_keys)
        _check_agreed(plan, site, silo_id)
        _check_encoder_bytes(plan, policy)

        # Last the contents of files, block by block, before weeks of work depend on them.
        _check_base(accepted)
        check_own_experts(site, plan, silo_id)
        _check_noise(accepted)
        read_earlier_plans(plan, partial(_read_listed, accepted.folder))

        # Left by an acceptance that ended between the rename and the new state.
        shutil.rmtree(plan_folder(site, plan_id), ignore_errors=True)
        move_into_place(part, plan_folder(site, plan_id))
        return load_accepted(site, plan_id, accepted.digest)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Keep the courier from removing a plan while it is copied.

    Raises:
        BusyError: it is at work there just now.
        AbsentFileError: it removed the plan already.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_for_reading(folder))
        except BlockingIOError as error:
            raise BusyError(
                "plan bundle",
                expected="a bundle that no other program uses",
                got="one that the courier is changing",
                remedy="Look again in a moment.",
            ) from error
        except OSError as error:
            raise AbsentFileError(
                "plan bundle",
                expected="a bundle in the inbox",
                got=f"a folder that is being removed ({error.strerror})",
                remedy="Nothing to do: the courier puts another one in its place.",
            ) from error
        yield


def _check_files_are_signed(plan: Plan, verified: VerifiedRelease) -> None:
    """Check that the plan lists the files that the signature covers, and no others."""
    listed = {(file.path, file.bytes, file.digest) for file in plan.files}
    signed = set()
    for name, file in verified.files.items():
        # The plan does not list itself, nor the proofs of the log that were made after it.
        if name != "plan.json" and name not in PLAN_LOG_NAMES:
            signed.add((name, file.bytes, file.digest))
    if listed != signed:
        names = sorted({name for name, _, _ in listed ^ signed})
        raise DigestError(
            "files of plan.json",
            expected="exactly those that the signature lists",
            got=f"{len(names)} unlisted or different, such as {ascii(names[0])[:80]}",
        )


def _check_own_key(
    plan_id: str, silo_id: str, key: PublicKey, silo_keys: Mapping[str, str]
) -> None:
    """Refuse a plan in which another key than this silo's would sign in its place."""
    # The attack: an aggregator delegates this silo's role to a key of its own, and publishes experts in the silo's
    # name.
    fingerprint = silo_keys.get(silo_id)
    if fingerprint == key.fingerprint:
        return
    got = "no key"
    if fingerprint:
        got = f"{group_fingerprint(fingerprint)}, which could sign in place of this silo"
    raise SignatureError(
        f"plan {plan_id}: key of silo {silo_id}",
        expected=f"this silo's key, {key.short}",
        got=got,
        remedy=(
            "After `silo rotate SITE --out card.json`, give the aggregator the new card and ask for "
            "another plan. Otherwise ask who holds that key, and answer no plan of this federation "
            "until you know."
        ),
    )


def _check_agreed(plan: Plan, site: Site, silo_id: str) -> None:
    """Check that the plan states the size that this site put on its card; another one would change its prior."""
    # The size bounds the silo's prior, which is its weight in the ensemble.
    card_size = site.agreed()
    plan_size = plan.agreed[silo_id]
    if card_size == plan_size:
        return
    subject = f"plan {plan.plan_id}: agreed size of {silo_id}"
    remedy = (
        "Give the aggregator this site's present card, and ask for a new plan: `silo enroll SITE "
        "--out card.json`."
    )
    if card_size is None:
        raise PolicyError(
            subject,
            expected="a card that this site has made",
            got="no card in private/card.json",
            remedy=remedy,
        )
    raise PolicyError(
        subject,
        expected=f"{card_size}, as on this site's last card",
        got=f"{plan_size}",
        remedy=remedy,
    )


def _check_log(bundle: Path, verified: VerifiedRelease, checkpoints: CheckpointStore) -> None:
    """Check that the federation's log has the plan, if the root names one, and that the log only grew.

    An aggregator that shows two silos different plans would have to show them different logs, which this detects.
    """
    # A root without a log key belongs to a federation that keeps no log.
    if not verified.log_keys:
        return
    folder = bundle / "targets" / verified.plan_id
    plan_file = verified.files["plan.json"]
    entry = PlanSigned(plan_id=verified.plan_id, plan_digest=plan_file.digest)
    proof = read_small(folder, PLAN_PROOF_NAME, MAX_PROOF_BYTES)
    consistency = read_small(folder, PLAN_CONSISTENCY_NAME, MAX_CONSISTENCY_BYTES)
    log = read_log(verified.log_keys, proof, consistency, entry, PLAN_PROOF_NAME)
    checkpoints.record(log.view, PLAN_PROOF_NAME)


def _check_noise(accepted: AcceptedPlan) -> None:
    """Open the plan's files and check, before weeks of training, that its statistics would be more than noise."""
    sketch = accepted.files().sketch
    try:
        for statistic in statistics_of(accepted.plan.statistics).values():
            statistic.check_public(accepted.plan, sketch)
    except NumericalError as error:
        raise PolicyError(
            f"plan {accepted.plan.plan_id}: {error.subject}", expected=error.expected, got=error.got
        ) from error


def _check_encoder_bytes(plan: Plan, policy: Policy) -> None:
    """Check what a network of timm holds besides the weights in its file, such as tables of positions."""
    if not isinstance(plan.encoder, TimmEncoderSpec):
        return
    from ddm.encoders.timm import timm_bytes  # takes seconds, and most plans do not need it

    encoder_bytes = timm_bytes(plan.encoder)
    max_bytes = policy.sizes.max_memory_bytes
    if encoder_bytes > max_bytes:
        raise PolicyError(
            f"plan {plan.plan_id}: bytes of the encoder",
            expected=f"at most {max_bytes} (sizes.max_memory_bytes in policy.toml)",
            got=str(encoder_bytes),
        )


def _read_listed(folder: Path, file: File) -> bytes:
    return read_small(folder, file.path, MAX_DOCUMENT_BYTES)


def _check_base(accepted: AcceptedPlan) -> None:
    """Check the public expert that training starts from, block by block, before weeks of work depend on it."""
    plan = accepted.plan
    expert = plan.expert
    if expert.base is None:
        return
    specs = expected_tensors(expert.architecture, plan.expert_shape, plan.condition)
    file = plan.file(expert.base)
    path = accepted.folder / expert.base
    check_file(path, specs, max_bytes=file.bytes, max_abs=MAX_WEIGHT, digest=file.digest)
    if isinstance(expert.adaptation, PartialAdaptation):
        check_trained(specs, expert.adaptation.trained)


def load_accepted(site: Site, plan_id: str, digest: str) -> AcceptedPlan:
    """Read a plan accepted earlier; its digest was pinned then, so expiry no longer matters.

    Raises:
        DigestError: the site's copy has changed.
        FederationError: it is a plan of another federation than the one whose root this site pinned.
    """
    return _read_plan(site, plan_folder(site, plan_id), plan_id, digest)


def _read_plan(site: Site, bundle: Path, plan_id: str, digest: str) -> AcceptedPlan:
    folder = bundle / "targets" / plan_id
    data = read_bounded(folder / "plan.json", MAX_DOCUMENT_BYTES)
    digest_found = sha256_hex(data)
    if digest_found != digest:
        raise DigestError(
            "plan.json", expected=f"the digest pinned on acceptance, {digest}", got=digest_found
        )
    plan = Plan.parse(data, subject="plan.json")
    # A genuine plan in the folder of another one would be worked on under the wrong name.
    if plan.plan_id != plan_id:
        raise ReplayError("plan.json", expected=plan_id, got=plan.plan_id)
    # What this site signs for a plan names the plan's federation: it must be the one that the site joined.
    site.check_federation(plan, f"plan {plan_id}")
    return AcceptedPlan(plan=plan, digest=digest, folder=folder)
