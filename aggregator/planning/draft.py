"""Drafts a plan from a recipe and public images: fits what is public, and writes the document around it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.public_columns import PublicColumns
from aggregator.keys.rotation import next_receipts_key
from aggregator.keys.silo_rotation import cards_for_next_plan
from aggregator.membership.registry import read_cards
from aggregator.planning.carrying import CarriedExperts, reuse_public_parts
from aggregator.planning.columns import check_columns_kept, fitted_columns
from aggregator.planning.continuing import (
    ContinuedExperts,
    check_continued,
    complete_expert,
    read_continued,
)
from aggregator.planning.feasible import check_feasible
from aggregator.planning.recipe import Recipe
from aggregator.planning.released_base import check_not_submitted
from ddm.errors import SetupError
from ddm.planning.bases import check_held_out, check_licence
from ddm.planning.document import plan_of
from ddm.planning.fit import PublicImages, PublicParts, divide, fit_public_parts
from ddm.planning.networks import RecipeNetworks
from ddm.protocol.carried import CarriedSilo
from ddm.protocol.enrolment import Card
from ddm.protocol.learning import Adaptation
from ddm.protocol.plan import Plan
from ddm.routers.sketch import Sketch
from ddm.system.progress import ProgressCallback


@dataclass(frozen=True)
class Draft:
    """A plan that is ready to be signed.

    Attributes:
        plan: the document.
        folder: holds `plan/*.safetensors` as the plan lists them.
        images: the public images that it was fitted on, and those held out.
        sketch: what routers see of an image.
        columns: what a samples router learns from beside these images.
        training_cards: of the silos that train, which it was drafted for.
    """

    plan: Plan
    folder: Path
    images: PublicImages
    sketch: Sketch
    columns: PublicColumns = field(default_factory=dict)
    training_cards: Mapping[str, Card] = field(default_factory=dict)


@dataclass(frozen=True)
class FederationTerms:
    """What a plan takes from the federation's folder, read once.

    Attributes:
        name: the federation's, with which the plan's id begins.
        root_digest: the digest of its first root, which the plan names.
        licence: the licence of the releases that are made from the plan.
        receipt_key: signs receipts once the plan is in force.
        training_cards: of the silos that train, sorted: with the rotated key where one waits.
        continued: the experts of an earlier plan that silos train on; None where they start afresh.
    """

    name: str
    root_digest: str
    licence: str
    receipt_key: str
    training_cards: Mapping[str, Card]
    continued: ContinuedExperts | None


def draft_plan(
    federation: Federation,
    recipe: Recipe,
    networks: RecipeNetworks,
    public: Tensor | CarriedExperts,
    folder: Path,
    on_progress: ProgressCallback | None = None,
    *,
    columns: PublicColumns | None = None,
) -> Draft:
    """Make the public parts in `folder` and write the plan around them; nothing is signed yet.

    Args:
        federation: the federation whose plan it becomes.
        recipe: what the operator asks for.
        networks: those that the recipe names, see `ddm.planning.networks`.
        public: public images, shape (N, C, H, W); or what is carried over, with the public parts of its plan.
        folder: where the plan's files go.
        on_progress: called with the number of images encoded and of all images; encoding takes long with a large
            network.
        columns: the columns of all public images that the recipe's router learns from.

    Raises:
        SetupError: no silo is enrolled, or none that trains; the base has a licence that the releases do not keep; or
            see `ddm.planning.fit.fit_public_parts`.
        ReplayError: an expert that is carried over, or trained on, would mean something else; names the field.
        MissingFileError: the plan whose experts are trained on is not one of this federation.
        DataError: see `ddm.planning.fit.fit_public_parts`.
        SetupError, PolicyError: the plan could not work, see `aggregator.planning.feasible`; or a file that the recipe
            names as its base is an expert that a silo sent, or the base was trained on other public images.
    """
    carried = public if isinstance(public, CarriedExperts) else None
    terms = read_terms(federation, recipe.expert.adaptation, carried)
    # Before anything is fitted, which may take minutes.
    check_feasible(recipe, terms.training_cards)
    check_licence(networks.base, terms.licence)
    check_not_submitted(federation, networks.base)
    if isinstance(public, CarriedExperts):
        columns = public.columns
        check_columns_kept(columns, recipe)
        check_held_out(networks.base, public.images.fitted)
        parts = reuse_public_parts(recipe, networks, public, folder)
    else:
        fitted_rows, _ = divide(len(public), recipe.public)
        check_held_out(networks.base, public[fitted_rows])
        columns = fitted_columns(
            columns or {}, fitted_rows, recipe, networks.condition, terms.training_cards
        )
        parts = fit_public_parts(recipe, networks, public, folder, on_progress)

    plan = write_plan(recipe, terms, carried, parts, folder)
    # Only now, since these rules compare whole plans.
    if carried is not None:
        carried.check(plan)
    check_continued(plan, terms.continued)
    return Draft(plan, folder, parts.images, parts.sketch, columns, terms.training_cards)


def read_terms(
    federation: Federation, adaptation: Adaptation, carried: CarriedExperts | None
) -> FederationTerms:
    """Read what the federation's folder says about the next plan.

    Raises:
        SetupError: no silo is enrolled, or none that trains; or none has an expert that it could train on.
        MissingFileError: the plan whose experts are trained on is not one of this federation.
    """
    silos = _choose_training_silos(federation, carried)
    settings = federation.settings()
    return FederationTerms(
        name=settings.name,
        root_digest=federation.root_digest,
        licence=settings.licence,
        receipt_key=str(next_receipts_key(federation)),
        # The plan in force keeps the old keys.
        training_cards=cards_for_next_plan(federation, silos),
        continued=read_continued(federation, adaptation, silos),
    )


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
            remedy="Enroll silos first: `aggregator enroll FED CARD`.",
        )
    silos = set(enrolled)
    if carried is not None:
        silos -= carried.agreed.keys()
    if not silos:
        raise SetupError(
            "plan",
            expected="at least one silo that trains",
            got=f"{', '.join(enrolled)}, all carried over",
            remedy=(
                "Enroll the silo that joins, `aggregator enroll FED CARD`, or let one train again: "
                "--replace SILO."
            ),
        )
    return tuple(sorted(silos))


def write_plan(
    recipe: Recipe,
    terms: FederationTerms,
    carried: CarriedExperts | None,
    parts: PublicParts,
    folder: Path,
) -> Plan:
    """Return the plan: what the recipe and the cards state, and what was fitted."""
    agreed = {silo_id: card.agreed for silo_id, card in terms.training_cards.items()}
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
        name=terms.name,
        root_digest=terms.root_digest,
        valid_for=timedelta(days=recipe.valid_days),
        silos=tuple(terms.training_cards),
        carried=carried_silos,
        agreed=agreed,
        licence=terms.licence,
        receipt_key=terms.receipt_key,
        expert=complete_expert(recipe.expert, terms.continued, expert_shape),
    )
