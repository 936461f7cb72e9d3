"""Sign a drafted plan, lay out the bundle that silos are sent, and make the plan current."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np

from aggregator.config import PUBLIC_NAME, CurrentPlan, Federation
from aggregator.keys.ceremony import check_replaceable, conduct_ceremony
from aggregator.keys.rotation import next_receipts_key, use_next_receipts_key
from aggregator.keys.silo_rotation import cards_for_next_plan, use_rotated_cards
from aggregator.membership.registry import signing_key
from aggregator.membership.withdrawal import check_still_carried
from aggregator.planning.draft import Draft
from ddm.errors import BusyError, SetupError
from ddm.io.changes import Change
from ddm.io.files import link_or_copy, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import now_utc
from ddm.trust.ceremony import SigningRequest
from ddm.trust.paths import silo_role
from ddm.trust.repository import Repository


def check_signable(federation: Federation) -> None:
    """Refuse, before minutes are spent on a draft, to begin what could not be signed afterwards.

    Raises:
        BusyError: `aggregator run` is at work on the plan in force, or another command signs.
        SetupError: submissions to the plan in force wait for a decision, or are in no release.
    """
    federation.accepted.mkdir(parents=True, exist_ok=True)
    try:
        with locked(federation.accepted, "intake"):
            pass
    except BusyError as error:
        remedy = "Stop `aggregator run` first (Ctrl-C): the new plan ends the work on the one that it carries out."
        got = "`aggregator run` at work on the plan in force"
        raise BusyError(
            "plan", expected="a federation that nobody runs", got=got, remedy=remedy
        ) from error
    with federation.signing_lock():
        check_replaceable(federation)


def sign_plan(federation: Federation, draft: Draft, passphrase: bytes) -> list[str]:
    """Sign the plan, lay out the bundle that silos are sent, make the plan current.

    All of it comes into force at once, after the holders of `targets` have signed; until then the old plan works on.

    Returns:
        Whose signatures are missing, in words; empty when the plan is current.

    Raises:
        BusyError: `aggregator run` is at work on the plan that this one replaces, or another change is under way.
        PolicyError: a silo to carry over was withdrawn or removed since the plan was drafted.
        SetupError: submissions accepted for that plan are in no release, or the draft names a key that was rotated, or
            the agreed size of a card that was replaced.
        MissingFileError: a silo of the draft is not enrolled any more.
    """
    with locked(federation.accepted, "intake"), federation.signing_lock():
        check_replaceable(federation)
        plan = draft.plan
        if plan.receipt_key != (present := str(next_receipts_key(federation))):
            raise SetupError(
                f"plan {plan.plan_id}",
                expected=f"the present receipts key, {present}",
                got=f"{plan.receipt_key}, which was rotated after the plan was drafted",
                remedy="Draft the plan again: aggregator plan.",
            )
        check_still_carried(federation, plan)
        enrolled = cards_for_next_plan(federation, plan.silos)
        if other := [
            silo_id for silo_id, card in enrolled.items() if card.agreed != plan.agreed[silo_id]
        ]:
            raise SetupError(
                f"plan {plan.plan_id}",
                expected="the agreed sizes of the present cards",
                got=f"other ones of {', '.join(other)}, whose cards changed after the plan was drafted",
                remedy="Draft the plan again: aggregator plan.",
            )
        change = Change.begin(federation.path)
        _lay_out(draft, change.put(f"plans/{plan.plan_id}"))
        current = CurrentPlan(plan_id=plan.plan_id, plan_digest=plan.digest)
        write_atomic(change.put("plans/current.json"), current.encode())
        use_next_receipts_key(federation, change)
        repository = Repository(federation.tuf)
        carried = {each.silo_id: each.plan_id for each in plan.carried}
        in_force = repository.delegates().roles
        silos = {silo_id: signing_key(card) for silo_id, card in enrolled.items()}
        silos |= {
            silo_id: in_force[silo_role(origin, silo_id)] for silo_id, origin in carried.items()
        }
        use_rotated_cards(federation, change, plan.silos)
        delegates = replace(
            repository.delegates(), plan_id=plan.plan_id, silos=silos, carried=carried
        )
        targets = repository.next_targets(delegates, now_utc())
        purpose = f"start the plan {plan.plan_id}"
        request = SigningRequest.to_sign(targets, purpose, repository.targets(), repository.root())
        return conduct_ceremony(
            federation,
            change,
            [request],
            passphrase,
            act="plan",
            purpose=purpose,
            plan_id=plan.plan_id,
        )


def _lay_out(draft: Draft, home: Path) -> None:
    """Write everything but the signatures to where it comes into force with them."""
    targets = home / "bundle" / "targets" / draft.plan.plan_id
    for file in draft.plan.files:
        link_or_copy(draft.folder / file.path, targets / file.path)
    write_atomic(targets / "plan.json", draft.plan.encode())
    public, images = io.BytesIO(), draft.images
    arrays = {"fitted": images.fitted, "holdout": images.holdout}
    if images.latents:
        arrays |= {"fitted_latents": images.latents[0], "holdout_latents": images.latents[1]}
    stored = {name: array.numpy() for name, array in arrays.items()} | dict(draft.columns)
    np.savez_compressed(public, **stored)  # type: ignore[arg-type]
    write_atomic(home / PUBLIC_NAME, public.getvalue())
