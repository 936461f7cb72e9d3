"""Signs a plan's files: enters the plan in the log, and lists the files in the role `plans`."""

from collections.abc import Callable
from pathlib import Path

from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import MAX_DOCUMENT_BYTES, now_utc, sha256_hex
from ddm.protocol.plan import Plan
from ddm.publishing.folder import PublisherFolder
from ddm.publishing.log import sizes_given_out, stage_entries
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.entries import LogEntry, PlanSigned
from ddm.trust.paths import PLAN_LOG_NAMES
from ddm.trust.repository import Repository


def sign_plan_files(
    publisher: PublisherFolder,
    change: Change,
    repository: Repository,
    folder: Path,
    targets: bytes,
    key: Callable[[str], SigningKey],
    before: tuple[LogEntry, ...] = (),
) -> Plan:
    """Sign the plan in a folder, and write its proofs of the log beside it; return the plan.

    Args:
        publisher: the publisher whose log it enters.
        change: puts it into force.
        repository: the metadata, inside the change.
        folder: holds `plan.json` and `plan/`, inside the change.
        targets: delegates to the plan's silos, signed by the holders of `targets`.
        key: returns the keys plans, release, online and log.
        before: entries that the log gets first.

    Raises:
        FederationError: the plan names another federation; its silos would refuse it.
    """
    encoded = read_bounded(folder / "plan.json", MAX_DOCUMENT_BYTES)
    plan = Plan.parse(encoded, subject="plan.json")
    remedy = "Draft the plan again in the folder of this federation."
    plan.check_federation(repository.root_digest, f"plan {plan.plan_id}", remedy)
    plan_id = plan.plan_id
    plan_digest = sha256_hex(encoded)
    files = {f"{plan_id}/plan.json": (len(encoded), plan_digest)}
    for file in plan.files:
        files[f"{plan_id}/{file.path}"] = (file.bytes, file.digest)

    log_key = log_key_of(repository.root())
    if log_key is not None:
        entry = PlanSigned(plan_id=plan_id, plan_digest=plan_digest)
        log = stage_entries(publisher, change, log_key, key("log"), [*before, entry])
        proofs = log.prove(entry, sizes_given_out(publisher))
        # The proofs are signed with the plan, so that a silo can check the log before it accepts the plan.
        for name, proof in zip(PLAN_LOG_NAMES, proofs, strict=True):
            write_atomic(folder / name, proof)
            files[f"{plan_id}/{name}"] = (len(proof), sha256_hex(proof))
    repository.start_plan(
        plan_id,
        files,
        targets=targets,
        plans_key=key("plans"),
        release_key=key("release"),
        online_key=key("online"),
        now=now_utc(),
    )
    return plan
