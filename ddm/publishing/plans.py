"""Signs a plan's files: enters the plan in the log, and lists the files in the role `plans`."""

from collections.abc import Callable
from pathlib import Path

from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import MAX_DOCUMENT_BYTES, now_utc, sha256_hex
from ddm.protocol.plan import Plan
from ddm.publishing.home import Home
from ddm.publishing.journal import sizes_given_out, stage
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.entries import LogEntry, PlanSigned
from ddm.trust.paths import PLAN_LOG_NAMES
from ddm.trust.repository import Repository


def sign_plan_files(
    home: Home,
    change: Change,
    repository: Repository,
    folder: Path,
    targets: bytes,
    key: Callable[[str], SigningKey],
    before: tuple[LogEntry, ...] = (),
) -> Plan:
    """Sign the plan in a folder, and write its proofs of the log beside it; return the plan.

    Args:
        home: whose log it enters.
        change: puts it into force.
        repository: the metadata, inside the change.
        folder: holds `plan.json` and `plan/`, inside the change.
        targets: delegates to the plan's silos, signed by the holders of `targets`.
        key: returns the keys plans, release, online and log.
        before: entries that the log gets first.
    """
    encoded = read_bounded(folder / "plan.json", MAX_DOCUMENT_BYTES)
    plan = Plan.parse(encoded, subject="plan.json")
    plan_id = plan.plan_id
    files = {f"{plan_id}/plan.json": (len(encoded), sha256_hex(encoded))}
    files |= {f"{plan_id}/{file.path}": (file.bytes, file.digest) for file in plan.files}
    entry = PlanSigned(plan_id=plan_id, plan_digest=sha256_hex(encoded))
    if (log_key := log_key_of(repository.root())) is not None:
        log = stage(home, change, log_key, key("log"), [*before, entry])
        for name, data in zip(PLAN_LOG_NAMES, log.prove(entry, sizes_given_out(home)), strict=True):
            write_atomic(folder / name, data)
            files[f"{plan_id}/{name}"] = (len(data), sha256_hex(data))
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
