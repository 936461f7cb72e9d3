"""Draft a plan from a recipe and public images: fit what is public, write the document, work out its cost."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.public_columns import Columns, kept_columns
from aggregator.keys.rotation import next_receipts_key
from aggregator.keys.silo_rotation import cards_for_next_plan
from aggregator.membership.registry import cards
from aggregator.planning.carrying import Carrying, reuse_public
from aggregator.planning.columns import check_carried, fitted_columns
from aggregator.planning.continuing import check_continued, expert_of
from aggregator.planning.cost import Cost, cost_of
from aggregator.planning.feasible import check_feasible
from aggregator.planning.recipe import Recipe
from ddm.encoders import Progress
from ddm.errors import SetupError
from ddm.planning.document import plan_of
from ddm.planning.fit import Fitted, PublicImages, condition_of, divide, fit_public
from ddm.protocol.enrolment import Agreed
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
    public: Tensor | Carrying,
    folder: Path,
    on_progress: Progress | None = None,
    *,
    columns: Columns | None = None,
) -> Draft:
    """Fit the public parts into `folder` and write the plan around them; nothing is signed yet.

    Args:
        federation: whose plan it becomes.
        recipe: what the operator asks for.
        public: public images, shape (N, C, H, W); or what is carried over, with the public parts of its plan.
        folder: where the plan's files go.
        on_progress: called with images encoded and images in all, which is long with a large network.
        columns: the columns of all public images that the recipe's router learns from.

    Raises:
        SetupError: no silo is enrolled, or none that trains; or see `ddm.planning.fit.fit_public`.
        ReplayError: an expert that is carried over would mean something else; names the field.
        MissingFileError, TensorFileError, DataError: see `ddm.planning.fit.fit_public`.
        SetupError, PolicyError: the plan could not work, see `aggregator.planning.feasible`.
    """
    enrolled = cards(federation)
    if not enrolled:
        remedy = "Enroll silos first: aggregator enroll."
        raise SetupError(
            "plan", expected="at least one enrolled silo", got="no card in registry/", remedy=remedy
        )
    carrying = public if isinstance(public, Carrying) else None
    silos = tuple(sorted(enrolled.keys() - (carrying.agreed.keys() if carrying else set())))
    if not silos:
        remedy = "Enroll the silo that joins (aggregator enroll), or let one train again: --replace SILO."
        got = f"{', '.join(enrolled)}, all carried over"
        raise SetupError("plan", expected="at least one silo that trains", got=got, remedy=remedy)
    stated = cards_for_next_plan(federation, silos)
    check_feasible(recipe, stated)
    agreed = {silo_id: card.agreed for silo_id, card in stated.items()}
    if isinstance(public, Carrying):
        kept = kept_columns(federation, public.plan.plan_id)
        check_carried(kept, recipe)
        fitted = reuse_public(federation, recipe, public, folder)
    else:
        condition, rows = condition_of(recipe), divide(len(public), recipe.public)[0]
        kept = fitted_columns(columns or {}, rows, recipe, condition, silos)
        fitted = fit_public(recipe, public, folder, on_progress)
    plan = _document(federation, recipe, agreed, fitted, folder, carrying)
    if carrying:
        carrying.check(plan)
    check_continued(federation, plan)
    return Draft(
        plan, folder, fitted.images, cost_of(plan, fitted.sketch, fitted.images.seen), kept
    )


def _document(
    federation: Federation,
    recipe: Recipe,
    agreed: dict[str, Agreed],
    fitted: Fitted,
    folder: Path,
    carrying: Carrying | None,
) -> Plan:
    """Write the plan: what the recipe and the cards state, and what was fitted."""
    return plan_of(
        recipe,
        fitted,
        folder,
        name=federation.settings().name,
        valid_for=timedelta(days=recipe.valid_days),
        silos=tuple(agreed),
        carried=carrying.carried if carrying else (),
        agreed={**agreed, **(carrying.agreed if carrying else {})},
        receipt_key=str(next_receipts_key(federation)),
        partition=recipe.partition,
        expert=expert_of(
            federation, recipe, fitted.latent.shape(recipe.data.shape), silos=tuple(agreed)
        ),
        statistics=recipe.statistics,
        audit=recipe.audit,
        limits=recipe.limits,
        rehearsal=recipe.rehearsal,
    )
