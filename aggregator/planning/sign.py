"""Sign a drafted plan, lay out the bundle that silos are sent, and make the plan current."""

import io
from collections.abc import Mapping
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
from ddm.protocol.enrolment import Card
from ddm.protocol.plan import Plan
from ddm.trust.ceremony import SigningRequest
from ddm.trust.drafts import Delegates
from ddm.trust.paths import silo_role
from ddm.trust.repository import Repository


def check_signable(federation: Federation) -> None:
    """Refuse, before minutes are spent on a draft, to begin what could not be signed afterwards.

    Raises:
        BusyError: `aggregator run` is at work on the plan in force, or another command signs.
        SetupError: submissions to the plan in force wait for a decision, or are in no release.
    """
    federation.accepted.mkdir(parents=True, exist_ok=True)
    # Intake holds this lock while `aggregator run` is at work.
    try:
        with locked(federation.accepted, "intake"):
            pass
    except BusyError as error:
        remedy = (
            "Stop `aggregator run FED` first (Ctrl-C): the new plan ends the work on the one that it "
            "carries out."
        )
        got = "`aggregator run` at work on the plan in force"
        raise BusyError(
            "plan",
            expected="a federation in which `aggregator run` is stopped",
            got=got,
            remedy=remedy,
        ) from error
    with federation.signing_lock():
        check_replaceable(federation)


def sign_plan(federation: Federation, draft: Draft, passphrase: bytes) -> list[str]:
    """Sign the plan, lay out the bundle that silos are sent, make the plan current.

    All of it comes into force at once, after the holders of `targets` have signed; until then the old plan stays in
    force.

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
        # A key or a card may have changed between the draft and the operator's yes.
        _check_receipts_key(federation, plan)
        check_still_carried(federation, plan)
        training_cards = cards_for_next_plan(federation, plan.silos)
        _check_agreed_sizes(plan, training_cards)

        change = Change.begin(federation.path)
        _write_plan_folder(draft, change.put(f"plans/{plan.plan_id}"))
        current = CurrentPlan(plan_id=plan.plan_id, plan_digest=plan.digest)
        write_atomic(change.put("plans/current.json"), current.encode())
        use_next_receipts_key(federation, change)
        use_rotated_cards(federation, change, plan.silos)

        repository = Repository(federation.tuf)
        delegates = _delegates_of(plan, repository.delegates(), training_cards)
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


def _check_receipts_key(federation: Federation, plan: Plan) -> None:
    """Refuse a plan that names a receipts key which was rotated since: silos would refuse every receipt."""
    receipt_key = str(next_receipts_key(federation))
    if plan.receipt_key != receipt_key:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected=f"the present receipts key, {receipt_key}",
            got=f"{plan.receipt_key}, which was rotated after the plan was drafted",
            remedy="Draft the plan again: `aggregator plan FED --recipe FILE --public FILE`.",
        )


def _check_agreed_sizes(plan: Plan, training_cards: Mapping[str, Card]) -> None:
    """Refuse a plan with an agreed size that changed since: the silo would refuse the plan."""
    changed_silos = [
        silo_id for silo_id, card in training_cards.items() if card.agreed != plan.agreed[silo_id]
    ]
    if changed_silos:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="the agreed sizes of the present cards",
            got=f"other ones of {', '.join(changed_silos)}, whose cards changed after the plan was drafted",
            remedy="Draft the plan again: `aggregator plan FED --recipe FILE --public FILE`.",
        )


def _delegates_of(plan: Plan, in_force: Delegates, training_cards: Mapping[str, Card]) -> Delegates:
    """Return who may sign for the plan: silos that train by their cards, carried ones by the key that signed."""
    silo_keys = {silo_id: signing_key(card) for silo_id, card in training_cards.items()}
    carried_from = {}
    for carried in plan.carried:
        carried_from[carried.silo_id] = carried.plan_id
        # Not the key on its present card: its signature stays the one that it made for the earlier plan.
        silo_keys[carried.silo_id] = in_force.roles[silo_role(carried.plan_id, carried.silo_id)]
    return replace(in_force, plan_id=plan.plan_id, silos=silo_keys, carried=carried_from)


def _write_plan_folder(draft: Draft, folder: Path) -> None:
    """Write everything but the signatures to where it comes into force with them."""
    targets = folder / "bundle" / "targets" / draft.plan.plan_id
    for file in draft.plan.files:
        link_or_copy(draft.folder / file.path, targets / file.path)
    write_atomic(targets / "plan.json", draft.plan.encode())

    images = draft.images
    # These stay here: the router is judged on the same images later, and a plan that carries experts takes them over.
    arrays: dict[str, np.ndarray] = dict(draft.columns)
    arrays["fitted"] = images.fitted.numpy()
    arrays["holdout"] = images.holdout.numpy()
    if images.latents:
        fitted_latents, holdout_latents = images.latents
        arrays["fitted_latents"] = fitted_latents.numpy()
        arrays["holdout_latents"] = holdout_latents.numpy()
    # In memory first, so that the file appears whole or not at all.
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
    write_atomic(folder / PUBLIC_NAME, archive.getvalue())
