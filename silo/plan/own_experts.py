"""Finds a silo's own experts of an earlier plan, from which a plan trains on, and verifies that they are these."""

from collections.abc import Mapping

from ddm.errors import DigestError, MissingFileError
from ddm.io.files import read_bounded
from ddm.io.tensors import check_file
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.continuation import check_continuation
from ddm.protocol.learning import OwnAdaptation
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, submission_path
from ddm.training.planned import BaseExpert
from silo.config import Site

_REMEDY = "Restore private/ and outbox/ from backup, or ask the aggregator for a plan that trains from random weights."


def own_experts(site: Site, plan: Plan, silo_id: str) -> Mapping[str, BaseExpert]:
    """Return the experts that this silo trains on, by their names; empty where it starts from random weights.

    The plan names the digest of the silo's submission, which names those of its experts and of the earlier plan. The
    weights are read from where the worker alone writes.

    Raises:
        MissingFileError: the silo's files of the earlier plan are gone.
        DigestError: the site's copy of the earlier plan is not the one that the submission names.
        ReplayError: the experts would mean something else in this plan.
    """
    adaptation = plan.expert.adaptation
    if not isinstance(adaptation, OwnAdaptation) or silo_id not in adaptation.submissions:
        return {}
    submission = _own_submission(site, adaptation, silo_id)
    earlier_plan = _earlier_plan(site, submission)
    # Weights mean nothing without architecture, shape and path: trained on under others, they would be noise.
    check_continuation(earlier_plan, plan, silo_id)

    folder = site.private / "checkpoints" / earlier_plan.plan_id / "experts"
    experts = {}
    for expert in submission.experts:
        # The submission names the file by its path in the outbox; in the worker's folder each expert has its own.
        file = expert.file.model_copy(update={"path": "expert.safetensors"})
        experts[expert.expert_id] = BaseExpert(folder / expert.expert_id, file)
    return experts


def check_own_experts(site: Site, plan: Plan, silo_id: str) -> None:
    """Check the experts that this silo trains on, block by block, before weeks of work depend on them.

    Raises:
        MissingFileError, DigestError, ReplayError: see `own_experts`.
        TensorFileError: an expert is not what the plan implies.
    """
    specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    for expert in own_experts(site, plan, silo_id).values():
        path = expert.folder / expert.file.path
        if not path.is_file():
            raise MissingFileError(
                path.parent.name,
                expected="this silo's own expert, from which the plan trains on",
                got="no such file",
                remedy=_REMEDY,
            )
        check_file(
            path,
            specs,
            max_bytes=expert.file.bytes,
            max_abs=MAX_WEIGHT,
            digest=expert.file.digest,
        )


def _own_submission(site: Site, adaptation: OwnAdaptation, silo_id: str) -> Submission:
    """Read the submission with the digest that the plan names; the outbox may have several of the earlier plan."""
    digest = adaptation.submissions[silo_id]
    outbox = site.outbox / adaptation.plan_id
    for path in sorted(outbox.glob(f"*/{submission_path(silo_id)}")):
        data = read_bounded(path, MAX_DOCUMENT_BYTES)
        # The digest decides, whatever a path in the outbox is called.
        if sha256_hex(data) == digest:
            return Submission.parse(data, subject="own submission")
    raise MissingFileError(
        f"own submission to plan {adaptation.plan_id}",
        expected=f"the one from which the plan trains on, sha256 {digest[:16]}...",
        got="no such submission in the outbox",
        remedy=_REMEDY,
    )


def _earlier_plan(site: Site, submission: Submission) -> Plan:
    """Read the plan for which a submission was made, from where the worker keeps it."""
    plan_id = submission.plan_id
    path = site.private / "plans" / plan_id / "targets" / plan_id / "plan.json"
    if not path.is_file():
        raise MissingFileError(
            f"plan {plan_id}", expected="this site's copy of it", got="no such file", remedy=_REMEDY
        )
    data = read_bounded(path, MAX_DOCUMENT_BYTES)
    digest = sha256_hex(data)
    if digest != submission.plan_digest:
        raise DigestError(
            f"plan {plan_id}",
            expected=f"sha256 {submission.plan_digest[:16]}..., as this silo's submission names it",
            got=f"sha256 {digest[:16]}...",
            remedy=_REMEDY,
        )
    return Plan.parse(data, subject=f"plan {plan_id}")
