"""Draft a plan from a recipe and public images: fit what is public, write the document, work out its cost."""

import secrets
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from aggregator.config import Federation
from aggregator.keys.rotation import next_receipts_key
from aggregator.keys.silo_rotation import cards_for_next_plan
from aggregator.membership.registry import cards
from aggregator.planning.carrying import Carrying, reuse_public
from aggregator.planning.continuing import check_continued, expert_of
from aggregator.planning.cost import Cost, cost_of
from aggregator.planning.recipe import Recipe
from ddm.encoders import Progress
from ddm.errors import SetupError
from ddm.loading.plan import CENTROIDS_PATH, SKETCH_PATH
from ddm.planning.fit import Fitted, PublicImages, fit_public
from ddm.privacy.plan_cost import check_total
from ddm.protocol.base import File, now_utc
from ddm.protocol.plan import Agreed, Clustering, Plan, SketchSpec


@dataclass(frozen=True)
class Draft:
    """A plan that is ready to be signed, and what it will cost.

    Attributes:
        plan: the document.
        folder: holds `plan/*.safetensors` as the plan lists them.
        images: the public images that it was fitted on, and those held out.
        cost: what it costs each silo.
    """

    plan: Plan
    folder: Path
    images: PublicImages
    cost: Cost


def draft_plan(
    federation: Federation,
    recipe: Recipe,
    public: Tensor | Carrying,
    folder: Path,
    on_progress: Progress | None = None,
) -> Draft:
    """Fit the public parts into `folder` and write the plan around them; nothing is signed yet.

    Args:
        federation: whose plan it becomes.
        recipe: what the operator asks for.
        public: public images, shape (N, C, H, W); or what is carried over, with the public parts of its plan.
        folder: where the plan's files go.
        on_progress: called with images encoded and images in all, which is long with a large network.

    Raises:
        SetupError: no silo is enrolled, or none that trains; or see `ddm.planning.fit.fit_public`.
        ReplayError: an expert that is carried over would mean something else; names the field.
        MissingFileError, TensorFileError, DataError: see `ddm.planning.fit.fit_public`.
        PolicyError: the statistics cost more than the total that the recipe states.
    """
    enrolled = cards(federation)
    if not enrolled:
        remedy = "Enroll silos first: aggregator enroll."
        raise SetupError("plan", expected="at least one enrolled silo", got="no card in registry/", remedy=remedy)
    carrying = public if isinstance(public, Carrying) else None
    silos = tuple(sorted(enrolled.keys() - (carrying.agreed.keys() if carrying else set())))
    if not silos:
        remedy = "Enroll the silo that joins (aggregator enroll), or let one train again: --replace SILO."
        got = f"{', '.join(enrolled)}, all carried over"
        raise SetupError("plan", expected="at least one silo that trains", got=got, remedy=remedy)
    if isinstance(public, Carrying):
        fitted = reuse_public(federation, recipe, public, folder)
    else:
        fitted = fit_public(recipe, public, folder, on_progress)
    agreed = {silo_id: card.agreed for silo_id, card in cards_for_next_plan(federation, silos).items()}
    plan = _document(federation, recipe, agreed, fitted, folder, carrying)
    if carrying:
        carrying.check(plan)
    check_continued(federation, plan)
    check_total(plan)
    return Draft(plan, folder, fitted.images, cost_of(plan, fitted.sketch, fitted.images.seen))


def _document(
    federation: Federation,
    recipe: Recipe,
    agreed: dict[str, Agreed],
    fitted: Fitted,
    folder: Path,
    carrying: Carrying | None,
) -> Plan:
    """Write the plan: what the recipe and the cards state, and what was fitted, its files pinned by digest."""
    created = now_utc()
    return Plan(
        plan_id=f"{federation.settings().name}-{secrets.token_hex(4)}",
        created_at=created,
        expires_at=created + timedelta(days=recipe.valid_days),
        silos=tuple(agreed),
        carried=carrying.carried if carrying else (),
        agreed={**agreed, **(carrying.agreed if carrying else {})},
        receipt_key=str(next_receipts_key(federation)),
        files=tuple(File.of(path, folder / path) for path in fitted.paths),
        data=recipe.data,
        transform=recipe.transform,
        latent=fitted.latent,
        encoder=fitted.encoder,
        clustering=Clustering(
            path=CENTROIDS_PATH,
            num_fine=fitted.num_fine,
            num_coarse=recipe.clustering.num_coarse,
            balanced=recipe.clustering.balanced,
        ),
        sketch=SketchSpec(path=SKETCH_PATH, rank=recipe.sketch.rank),
        partition=recipe.partition,
        objective=recipe.objective,
        t_distribution=recipe.t_distribution,
        condition=fitted.condition,
        expert=expert_of(federation, recipe, fitted.latent.shape(recipe.data.shape), silos=tuple(agreed)),
        statistics=recipe.statistics,
        router=recipe.router,
        audit=recipe.audit,
        limits=recipe.limits,
    )
