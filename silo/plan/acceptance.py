"""Accepts a plan: copies it out of the hostile inbox, verifies it against the pinned root, then reads it."""

import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddm.errors import DigestError, NumericalError, PolicyError, ReplayError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import aside, move_into_place, read_bounded
from ddm.io.tensors import stored_bytes
from ddm.loading.plan import PlanFiles, sketch_noise_level
from ddm.models import expected_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, PLAN_ID_PATTERN, sha256_hex
from ddm.protocol.plan import Plan
from ddm.trust.verify import verify_bundle
from silo.config import Policy, Site
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
    bundles = [path for path in site.inbox.glob("*/bundle") if re.fullmatch(PLAN_ID_PATTERN, path.parent.name)]
    ordered = sorted(bundles, key=lambda path: path.lstat().st_mtime)
    return [path.parent.name for path in ordered if not workspace_folder(site, path.parent.name).exists()]


def workspace_folder(site: Site, plan_id: str) -> Path:
    """Where the site works on a plan; it exists from acceptance on, also after the work is done."""
    return site.private / "checkpoints" / plan_id


def receive_plan(
    site: Site, plan_id: str, policy: Policy, *, silo_id: str, max_bytes: int, now: datetime
) -> AcceptedPlan:
    """Copy, verify and check one plan; only a plan that passes everything gets its folder.

    Raises:
        TrustError: the bundle is not signed as the pinned root demands.
        FormatError: the bundle or a document in it is malformed.
        PolicyError: the plan requires more than this site allows.
    """
    with aside(plan_folder(site, plan_id)) as part:
        copy_tree_bounded(site.inbox / plan_id / "bundle", part, max_bytes=max_bytes)
        root = site.root_path.read_bytes()
        verified = verify_bundle(part, root, state=site.private / "trust", now=now)
        if verified.plan_id != plan_id:
            raise ReplayError("plan bundle", expected=plan_id, got=verified.plan_id)
        accepted = _read_plan(part, plan_id, verified.files["plan.json"].digest)
        listed = {file.path: (file.bytes, file.digest) for file in accepted.plan.files}
        signed = {name: (file.bytes, file.digest) for name, file in verified.files.items() if name != "plan.json"}
        if listed != signed:
            odd = sorted({name for name, _ in listed.items() ^ signed.items()})
            got = f"{len(odd)} unlisted or different, such as {ascii(odd[0])[:80]}"
            raise DigestError("files of plan.json", expected="exactly those that the signature lists", got=got)
        check_plan(accepted.plan, policy, silo_id=silo_id, now=now)
        _check_size(accepted.plan)
        _check_noise(accepted)
        shutil.rmtree(plan_folder(site, plan_id), ignore_errors=True)
        move_into_place(part, plan_folder(site, plan_id))
    return load_accepted(site, plan_id, accepted.digest)


def _check_noise(accepted: AcceptedPlan) -> None:
    """Open the plan's files and check, before weeks of training, that its sketches would be more than noise."""
    try:
        sketch_noise_level(accepted.plan, accepted.files().sketch)
    except NumericalError as error:
        raise PolicyError(
            f"plan {accepted.plan.plan_id}: {error.subject}", expected=error.expected, got=error.got
        ) from error


def _check_size(plan: Plan) -> None:
    """Check the architecture against the size that the plan declares, before anything of that size is allocated."""
    needed = stored_bytes(expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition))
    if needed > plan.limits.expert_bytes:
        limit = f"at most the plan's own limit of {plan.limits.expert_bytes} bytes"
        remedy = "Ask the aggregator for a plan with larger limits.expert_bytes; policy.toml cannot change it."
        subject = f"plan {plan.plan_id}: size of an expert"
        raise PolicyError(subject, expected=limit, got=f"{needed} bytes", remedy=remedy)


def load_accepted(site: Site, plan_id: str, digest: str) -> AcceptedPlan:
    """Read a plan accepted earlier; its digest was pinned then, so expiry no longer matters.

    Raises:
        DigestError: the site's copy has changed.
    """
    return _read_plan(plan_folder(site, plan_id), plan_id, digest)


def _read_plan(bundle: Path, plan_id: str, digest: str) -> AcceptedPlan:
    folder = bundle / "targets" / plan_id
    data = read_bounded(folder / "plan.json", MAX_DOCUMENT_BYTES)
    if (found := sha256_hex(data)) != digest:
        raise DigestError("plan.json", expected=f"the digest pinned on acceptance, {digest}", got=found)
    plan = Plan.parse(data, subject="plan.json")
    if plan.plan_id != plan_id:
        raise ReplayError("plan.json", expected=plan_id, got=plan.plan_id)
    return AcceptedPlan(plan=plan, digest=digest, folder=folder)
