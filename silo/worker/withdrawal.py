"""Gives a plan up, from any state, and leaves a word for the aggregator that this silo's key has signed."""

import shutil

from ddm.errors import ApprovalError
from ddm.io.files import write_for_group
from ddm.io.locks import locked
from ddm.io.modes import group_folder
from ddm.protocol.base import now_utc
from ddm.protocol.leave import LEAVE_NAME
from ddm.trust.keys import SigningKey
from ddm.trust.sealed_documents import seal_leave_notice
from silo.config import Site
from silo.decisions import DecisionLog, Withdrew
from silo.worker.approval import approval_path, review_folder
from silo.worker.state import State, load_state, save_state, state_path, write_courier_status


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
        DecisionLogError: the site's log of decisions is damaged.
    """
    with locked(site.private, "worker"):
        state = load_state(state_path(site.private))
        if state.plan_id is None or state.state in ("waiting", "superseded"):
            got = (
                f"plan {state.plan_id}, which plan {state.successor} replaced"
                if state.plan_id
                else "no plan"
            )
            remedy = "Nothing needs to be given up. To wait for the next plan: silo run SITE."
            raise ApprovalError(
                "withdrawal", expected="a plan in work, or an accepted one", got=got, remedy=remedy
            )
        new = state if state.state == "withdrawn" else state.after("withdraw")
        if state.state != "withdrawn":
            DecisionLog(site).add(Withdrew(plan_id=state.plan_id, state=state.state))
        folder = site.outbox / state.plan_id
        group_folder(folder, site.outbox)
        write_for_group(
            folder / LEAVE_NAME,
            seal_leave_notice(state.plan_id, site.settings().silo_id, key, now_utc()),
        )
        if state.state not in ("accepted", "withdrawn"):
            _empty_outbox(site, state)
        # A plan that was declined is not looked at again: it counts as one that this site has worked on.
        (site.private / "checkpoints" / state.plan_id).mkdir(parents=True, exist_ok=True)
        save_state(state_path(site.private), new)
        write_courier_status(site, new)
        from silo.worker.jobs import end_jobs  # here, since it loads torch

        end_jobs(site, state.plan_id)
        approval_path(site).unlink(missing_ok=True)
        shutil.rmtree(review_folder(site), ignore_errors=True)
        return new


def _empty_outbox(site: Site, state: State) -> None:
    """Remove what may not have left yet; the folder stays, so that its number is known."""
    sent = site.outbox / (state.plan_id or "") / str(state.sequence)
    for path in sent.iterdir() if sent.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def describe_consequences(before: State) -> str:
    """Say what giving up a plan in this state means."""
    if before.state == "accepted":
        return (
            "What was accepted stays in the versions that were "
            "published; the aggregator leaves it out of later ones."
        )
    if before.state == "in_outbox":
        return (
            "What has not left yet was removed from the outbox; what "
            "has left is left out of every version from now on."
        )
    if before.state == "plan_refused":
        return "Nothing was trained or drawn for it, and this site will not take it."
    if before.state == "withdrawn":
        return "It was given up before; the word for the aggregator is written anew."
    if before.state == "refused":
        return "What was refused is used nowhere. What its statistics cost stays in the ledger."
    return "Nothing was sent. What its statistics cost, if any were drawn, stays in the ledger."
