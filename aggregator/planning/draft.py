"""Draft a plan from a recipe and public images: fit what is public, write the document, work out its cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.public_columns import Columns, kept_columns
from aggregator.keys.rotation import next_receipts_key
from aggregator.keys.silo_rotation import cards_for_next_plan
from aggregator.membership.registry import read_cards
from aggregator.planning.carrying import CarriedExperts, reuse_public_parts
from aggregator.planning.columns import check_columns_kept, fitted_columns
from aggregator.planning.continuing import check_continued, complete_expert
from aggregator.planning.cost import Cost, estimate_cost
from aggregator.planning.feasible import check_feasible
from aggregator.planning.recipe import Recipe
from ddm.encoders import Progress
from ddm.errors import SetupError
from ddm.planning.document import plan_of
from ddm.planning.fit import PublicImages, PublicParts, condition_of, divide, fit_public_parts
from ddm.protocol.carried import CarriedSilo
from ddm.protocol.enrolment import Card
from ddm.protocol.plan import Plan


@dataclass(frozen=True)
class Draft:
    """A plan that is ready to be signed, and what it will cost.

    Attributes:
        plan: the document.
        folder: holds `plan/*.safetensors` as the plan lists them.
        images: the public images that it was fitted on, and those held out.
        cost: what it costs each silo.
        columns: what a samples router learns from beside these images.
    """

    plan: Plan
    folder: Path
    images: PublicImages
    cost: Cost
    columns: Columns = field(default_factory=dict)


def draft_plan(
    federation: Federation,
    recipe: Recipe,
    public: Tensor | CarriedExperts,
    folder: Path,
    on_progress: Progress | None = None,
    *,
    columns: Columns | None = None,
) -> Draft:
    """Make the public parts in `folder` and write the plan around them; nothing is signed yet.

    Args:
        federation: whose plan it becomes.
        recipe: what the operator asks for.
        public: public images, shape (N, C, H, W); or what is carried over, with the public parts of its plan.
        folder: where the plan's files go.
        on_progress: called with images encoded and images in all, which is long with a large network.
        columns: the columns of all public images that the recipe's router learns from.

    Raises:
        SetupError: no silo is enrolled, or none that trains; or see `ddm.planning.fit.fit_public_parts`.
        ReplayError: an expert that is carried over would mean something else; names the field.
        MissingFileError, TensorFileError, DataError: see `ddm.planning.fit.fit_public_parts`.
        SetupError, PolicyError: the plan could not work, see `aggregator.planning.feasible`.
    """
    carried = public if isinstance(public, CarriedExperts) else None
    training_silos = _choose_training_silos(federation, carried)
    # With the rotated key where one waits; the plan in force keeps the old one.
    training_cards = cards_for_next_plan(federation, training_silos)
    # Before anything is fitted, which may take minutes.
    check_feasible(recipe, training_cards)

    if isinstance(public, CarriedExperts):
        columns = kept_columns(federation, public.plan.plan_id)
        check_columns_kept(columns, recipe)
        parts = reuse_public_parts(federation, recipe, public, folder)
    else:
        fitted_rows, _ = divide(len(public), recipe.public)
        condition = condition_of(recipe)
        columns = fitted_columns(columns or {}, fitted_rows, recipe, condition, training_silos)
        parts = fit_public_parts(recipe, public, folder, on_progress)

    plan = _write_plan(federation, recipe, training_cards, carried, parts, folder)
    if carried is not None:
        # Only now, since these rules compare whole plans.
        carried.check(plan)
    check_continued(federation, plan)
    cost = estimate_cost(plan, parts.sketch, parts.images.seen)
    return Draft(plan, folder, parts.images, cost, columns)


def _choose_training_silos(
    federation: Federation, carried: CarriedExperts | None
) -> tuple[str, ...]:
    """Return the enrolled silos that are not carried over, sorted."""
    enrolled = read_cards(federation)
    if not enrolled:
        raise SetupError(
            "plan",
            expected="at least one enrolled silo",
            got="no card in registry/",
            remedy="Enroll silos first: aggregator enroll.",
        )
    silos = set(enrolled)
    if carried is not None:
        silos -= carried.agreed.keys()
    if not silos:
        raise SetupError(
            "plan",
            expected="at least one silo that trains",
            got=f"{', '.join(enrolled)}, all carried over",
            remedy="Enroll the silo that joins (aggregator enroll), or let one train again: --replace SILO.",
        )
    return tuple(sorted(silos))


def _write_plan(
    federation: Federation,
    recipe: Recipe,
    training_cards: Mapping[str, Card],
    carried: CarriedExperts | None,
    parts: PublicParts,
    folder: Path,
) -> Plan:
    """Write the plan: what the recipe and the cards state, and what was fitted."""
    silos = tuple(training_cards)
    agreed = {silo_id: card.agreed for silo_id, card in training_cards.items()}
    carried_silos: tuple[CarriedSilo, ...] = ()
    if carried is not None:
        carried_silos = carried.carried
        agreed |= carried.agreed
    # The latents are described by now: an expert that trains on may need another grid of positions.
    expert_shape = parts.latent.shape(recipe.data.shape)
    return plan_of(
        recipe,
        parts,
        folder,
        name=federation.settings().name,
        valid_for=timedelta(days=recipe.valid_days),
        silos=silos,
        carried=carried_silos,
        agreed=agreed,
        receipt_key=str(next_receipts_key(federation)),
        expert=complete_expert(federation, recipe, expert_shape, silos),
    )
