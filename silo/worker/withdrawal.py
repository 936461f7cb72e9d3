"""Gives a plan up, from any state, and leaves a notice for the aggregator that this silo's key has signed."""

import shutil
from contextlib import suppress

from ddm.errors import ApprovalError, DigestError, FormatError, MissingFileError
from ddm.io.files import write_for_group
from ddm.io.locks import locked
from ddm.io.modes import group_folder
from ddm.protocol.base import now_utc
from ddm.protocol.leave import LEAVE_NAME, Leave
from ddm.trust.keys import SigningKey
from ddm.trust.sealed_documents import seal_leave_notice
from silo.config import Site
from silo.decisions import DecisionLog, PlanWithdrawn
from silo.worker.approval import approval_path, review_folder
from silo.worker.state import State, load_state, save_state, state_path, write_courier_status


def check_withdrawable(state: State) -> str:
    """Return the plan that can be given up in this state.

    Raises:
        ApprovalError: there is none.
    """
    if state.plan_id is not None and state.state not in ("waiting", "superseded"):
        return state.plan_id
    got = "no plan"
    if state.plan_id is not None:
        got = f"plan {state.plan_id}, which plan {state.successor} replaced"
    raise ApprovalError(
        "withdrawal",
        expected="a plan in progress, or an accepted one",
        got=got,
        remedy="Nothing needs to be given up. To wait for the next plan: `silo run SITE`.",
    )


def withdraw_from_plan(site: Site, key: SigningKey) -> State:
    """Give up the present plan, or take back what was sent for it; debits and draws stay in the ledger.

    What has left cannot be called back: the aggregator leaves it out of every later version, and earlier ones keep it.
    What waits in the outbox is removed from there. A second call finishes one that was interrupted.

    Args:
        site: the silo's folder.
        key: its signing key.

    Raises:
        BusyError: the worker is running.
        ApprovalError: there is no plan to give up.
        FederationError: the plan is of another federation than the root that this site pinned.
        DecisionLogError: the site's log of decisions is damaged.
    """
    with locked(site.private, "worker"):
        state = load_state(state_path(site.private))
        plan_id = check_withdrawable(state)
        _check_federation(site, plan_id, state.plan_digest)
        withdrawn = state
        if state.state != "withdrawn":
            withdrawn = state.after("withdraw")
            DecisionLog(site).add(PlanWithdrawn(plan_id=plan_id, state=state.state))
        # The notice before the state: a call that is interrupted here is finished by a second one.
        _leave_notice(site, plan_id, key)
        # What was accepted has left; the outbox is the record of it.
        if state.state not in ("accepted", "withdrawn"):
            empty_outbox(site, state)
        # A plan that was declined is not looked at again: it counts as one that this site has worked on.
        site.work_folder(plan_id).mkdir(parents=True, exist_ok=True)
        save_state(state_path(site.private), withdrawn)
        write_courier_status(site, withdrawn)
        from silo.worker.jobs import end_jobs  # here, since it loads torch

        end_jobs(site, plan_id)
        approval_path(site).unlink(missing_ok=True)
        shutil.rmtree(review_folder(site), ignore_errors=True)
        return withdrawn


def _check_federation(site: Site, plan_id: str, plan_digest: str | None) -> None:
    """Refuse to sign a notice that names another federation than the plan: its aggregator would throw it away.

    The root may have been replaced since the plan was accepted.
    """
    from silo.plan.acceptance import load_accepted  # here, since it loads torch

    # A plan that was refused has no copy here, and a damaged copy is no reason to stay in a plan.
    if plan_digest is None:
        return
    with suppress(DigestError, FormatError, MissingFileError):
        load_accepted(site, plan_id, plan_digest)


def _leave_notice(site: Site, plan_id: str, key: SigningKey) -> None:
    """Put a signed notice for the aggregator into the outbox: only this silo can take itself out."""
    folder = site.outbox / plan_id
    group_folder(folder, site.outbox)
    notice = Leave(
        root_digest=site.root_digest,
        plan_id=plan_id,
        silo_id=site.settings().silo_id,
        at=now_utc(),
    )
    write_for_group(folder / LEAVE_NAME, seal_leave_notice(notice, key))


def empty_outbox(site: Site, state: State) -> None:
    """Remove a submission that may not have left yet; the folder stays, so that its number is known."""
    folder = site.outbox / (state.plan_id or "") / str(state.sequence)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def empty_outbox_of_superseded_plan(site: Site, state: State) -> None:
    """Remove the submission to a superseded plan, unless it was answered: then it has left, and the outbox records it.

    An earlier version of this program left such submissions in the outbox, from where they could still be fetched.
    """
    if state.state != "superseded":
        return
    receipt = site.inbox / (state.plan_id or "") / "receipts" / f"{state.sequence}.json"
    if not receipt.exists():
        empty_outbox(site, state)


def describe_consequences(state: State) -> str:
    """Say what it means to give up a plan in this state."""
    if state.state == "accepted":
        return (
            "The accepted submission stays in the versions that are published already; "
            "the aggregator leaves it out of later ones, also if a later plan has carried the expert over. "
            "The notice arrives while `silo run` runs here and `aggregator run` there. "
            "If `aggregator run` has ended, ask its operator for `aggregator withdraw`."
        )
    if state.state == "in_outbox":
        return (
            "What has not left yet is removed from the outbox; "
            "what has left is left out of every later version."
        )
    if state.state == "plan_refused":
        return "Nothing was trained or drawn for it, and this site will not take it."
    if state.state == "withdrawn":
        return "It was given up before; the notice for the aggregator is written again."
    if state.state == "refused":
        return (
            "The refused submission is used nowhere. What its statistics cost stays in the ledger."
        )
    return "Nothing was sent. What its statistics cost, if any were drawn, stays in the ledger."
