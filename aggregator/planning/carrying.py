"""Takes over experts of the plan in force into the next one, with the public files that give them their meaning.

Only experts of the plan in force can be carried over. When a plan is replaced, the roles that its successor does not
carry are removed from the snapshot for good, so that nobody brings back what a silo withdrew; what the plan in force
carries itself is carried further.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.config import Federation
from aggregator.intake.examination import public_images
from aggregator.intake.inventory import Inventory, take_inventory
from aggregator.intake.public_columns import PublicColumns, kept_columns
from aggregator.keys.silo_rotation import cards_for_next_plan
from aggregator.planning.recipe import Recipe
from ddm.errors import PolicyError, SetupError
from ddm.io.files import link_or_copy
from ddm.loading.plan import PlanFiles
from ddm.planning.fit import PublicImages, PublicParts, write_base
from ddm.planning.networks import (
    RecipeNetworks,
    recipe_autoencoder_digest,
    recipe_encoder_digest,
)
from ddm.planning.recipe import DiffusersKlRecipe, HogRecipe, PcaRecipe, TimmRecipe
from ddm.protocol.base import sha256_file
from ddm.protocol.carried import CarriedSilo
from ddm.protocol.encoder import HogEncoderSpec, TimmEncoderSpec
from ddm.protocol.enrolment import AgreedSize
from ddm.protocol.growth import check_carried, check_consent
from ddm.protocol.latent import Autoencoder, AutoencoderKlLatent, AutoencoderSize, DiffusersKlLatent
from ddm.protocol.plan import Plan

# In place of the id of the plan in force, which no plan can have: ids end with 8 hex digits.
PLAN_IN_FORCE = "current"


@dataclass(frozen=True)
class CarriedExperts:
    """The experts that the next plan takes over.

    Attributes:
        plan: the plan in force.
        carried: the silos whose experts are carried over.
        agreed: their agreed sizes.
        earlier: the plans for which these silos trained, by id.
        folder: holds the plan's `plan.json` and `plan/`.
        images: the public images that the plan was fitted on, and those held out.
        columns: what the plan keeps beside these images.
    """

    plan: Plan
    carried: tuple[CarriedSilo, ...]
    agreed: Mapping[str, AgreedSize]
    earlier: Mapping[str, Plan]
    folder: Path
    images: PublicImages
    columns: PublicColumns

    def check(self, new: Plan) -> None:
        """Refuse a plan in which a carried expert would mean something else than where it was trained.

        Raises:
            ReplayError: names the field.
        """
        for carried in self.carried:
            check_carried(carried, self.earlier[carried.plan_id], new)


def choose_carried(
    federation: Federation, plan_id: str, replaced: Collection[str]
) -> CarriedExperts:
    """Choose the silos whose experts are carried over: all accepted ones that were not withdrawn, except some.

    Args:
        federation: the operator's folder.
        plan_id: the plan in force, by its id or as `PLAN_IN_FORCE`.
        replaced: silos that train again.

    Raises:
        SetupError: another plan is in force, nothing was accepted, or a silo to replace has no accepted submission.
        ReplayError: a silo has not consented to later plans.
        PolicyError: the agreed size of a silo changed since.
    """
    plan, _ = federation.current_plan()
    if plan_id not in (PLAN_IN_FORCE, plan.plan_id):
        raise SetupError(
            f"--carry {plan_id[:80]}",
            expected=f"the plan in force, {plan.plan_id}, which includes the experts that it carries over itself",
            got="another plan",
            remedy="Use --carry current. Experts that the plan in force did not carry over must be trained again.",
        )
    inventory = take_inventory(federation)
    unknown = sorted(set(replaced) - inventory.silos.keys())
    if unknown:
        raise SetupError(
            "--replace",
            expected=f"silos with an accepted submission: {', '.join(inventory.silos)}",
            got=", ".join(unknown)[:200],
            remedy="Name silos from this list with --replace.",
        )

    chosen = []
    for silo_id, silo in inventory.silos.items():
        if silo_id in replaced:
            continue
        submission = silo.submission
        carried = CarriedSilo(
            silo_id=silo_id,
            # Of the plan for which it trained: also where the plan in force carries this silo itself.
            plan_id=submission.plan_id,
            plan_digest=submission.plan_digest,
            submission_digest=silo.digest,
        )
        check_consent(carried, submission)
        chosen.append(carried)
    if not chosen:
        raise SetupError(
            "--carry",
            expected=f"an accepted silo of {plan.plan_id} to carry over",
            got="none: --replace names all of them",
            remedy="Leave one silo out of --replace, or sign a plan without --carry.",
        )
    _check_sizes(federation, inventory, chosen)

    plan_by_id = {plan.plan_id: plan, **inventory.earlier_plans}
    return CarriedExperts(
        plan=plan,
        carried=tuple(chosen),
        # `_check_sizes` has found these equal to the present cards'.
        agreed={carried.silo_id: plan.agreed[carried.silo_id] for carried in chosen},
        earlier={carried.plan_id: plan_by_id[carried.plan_id] for carried in chosen},
        folder=federation.plan_targets(plan.plan_id),
        images=_public_images(federation, plan),
        columns=kept_columns(federation, plan.plan_id),
    )


def _check_sizes(
    federation: Federation, inventory: Inventory, carried_silos: list[CarriedSilo]
) -> None:
    """Refuse to carry a silo whose agreed size changed: its prior was counted by the earlier one."""
    cards = cards_for_next_plan(federation, [carried.silo_id for carried in carried_silos])
    for carried in carried_silos:
        agreed_in_plan = inventory.plan.agreed[carried.silo_id]
        agreed_now = cards[carried.silo_id].agreed
        if agreed_in_plan != agreed_now:
            raise PolicyError(
                f"agreed size of {carried.silo_id}, to be carried over",
                expected=f"{agreed_in_plan}, as in the plan for which it trained",
                got=f"{agreed_now} on its present card",
                remedy=f"Let it train again, so that the new size counts: --replace {carried.silo_id}.",
            )


def reuse_public_parts(
    recipe: Recipe, networks: RecipeNetworks, experts: CarriedExperts, folder: Path
) -> PublicParts:
    """Copy encoder, centroids, sketch and autoencoder into `folder`, with the public images; nothing is fitted.

    Args:
        recipe: what the operator asks for.
        networks: those that the recipe names beside these parts.
        experts: what is carried over.
        folder: where the plan's files go.

    Raises:
        SetupError: the recipe asks for others.
        DigestError, TensorFileError: a file is not the one that the plan in force lists.
    """
    plan = experts.plan
    _check_recipe_keeps_parts(recipe, plan)

    paths = [plan.encoder.path, plan.clustering.path, plan.sketch.path]
    if isinstance(plan.latent, Autoencoder):
        paths.append(plan.latent.path)
    for path in paths:
        link_or_copy(experts.folder / path, folder / path)
    # A carried submission names the digest of its own plan: anybody who verifies it needs that document.
    paths += _copy_earlier_plans(experts, folder)

    paths += write_base(recipe.expert, networks, folder)
    files = PlanFiles.load(plan, experts.folder)
    return PublicParts(
        images=experts.images,
        paths=tuple(sorted(paths)),
        encoder=plan.encoder,
        latent=plan.latent,
        num_fine=plan.clustering.num_fine,
        condition=networks.condition,
        sketch=files.sketch,
        network=files.encoder,
        clusters=files.clusters,
        autoencoder=files.latent,
        base=networks.base,
    )


def _copy_earlier_plans(experts: CarriedExperts, folder: Path) -> list[str]:
    """Copy the documents of the plans for which the silos trained, and return their paths in the new plan."""
    paths = []
    for carried in experts.carried:
        if carried.plan_path in paths:
            continue
        source_name = carried.plan_path
        if carried.plan_id == experts.plan.plan_id:
            source_name = "plan.json"
        link_or_copy(experts.folder / source_name, folder / carried.plan_path)
        paths.append(carried.plan_path)
    return paths


def _public_images(federation: Federation, plan: Plan) -> PublicImages:
    fitted = public_images(federation, plan.plan_id, "fitted", as_latents=False)
    holdout = public_images(federation, plan.plan_id, "holdout", as_latents=False)
    if not isinstance(plan.latent, Autoencoder):
        return PublicImages(fitted, holdout)
    fitted_latents = public_images(federation, plan.plan_id, "fitted")
    holdout_latents = public_images(federation, plan.plan_id, "holdout")
    return PublicImages(fitted, holdout, (fitted_latents, holdout_latents))


def _check_recipe_keeps_parts(recipe: Recipe, plan: Plan) -> None:
    """Refuse a recipe that asks for other public parts than the plan in force has."""
    for field, in_plan, in_recipe in _compared_fields(recipe, plan):
        if in_plan != in_recipe:
            raise SetupError(
                f"recipe, {field}",
                expected=f"{in_plan}, as in plan {plan.plan_id}, whose experts go on",
                got=f"{in_recipe}",
                remedy="Experts go on only with the public files that give them their meaning: keep what the earlier "
                "recipe states, or sign a plan without --carry, for which every silo trains again.",
            )


def _compared_fields(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of the public parts, as the plan has them and as the recipe does.

    `CarriedExperts.check` compares the other fields, once the new plan is written.
    """
    encoder = plan.encoder
    yield "encoder.kind", encoder.kind, recipe.encoder.kind
    match recipe.encoder:
        case PcaRecipe():
            yield "encoder.dim", encoder.dim, recipe.encoder.dim
        case HogRecipe():
            yield "encoder.dim", encoder.dim, recipe.encoder.dim
            if isinstance(encoder, HogEncoderSpec):
                yield "encoder.cells", encoder.cells, recipe.encoder.cells
                yield "encoder.mirrored", encoder.mirrored, recipe.encoder.mirrored
        case TimmRecipe() if isinstance(encoder, TimmEncoderSpec):
            yield "encoder.model", encoder.model, recipe.encoder.model
            image_size = recipe.encoder.image_size or encoder.image_size
            yield "encoder.image_size", encoder.image_size, image_size
            # Of the same network with other weights, an image has other features.
            digest_in_plan = plan.file(encoder.path).digest
            yield "encoder.weights, digest", digest_in_plan, recipe_encoder_digest(recipe)

    # Experts of other latents would draw noise: sizes and factors must all be the same.
    yield "latent.kind", plan.latent.kind, recipe.latent.kind
    if isinstance(plan.latent, AutoencoderKlLatent) and isinstance(recipe.latent, AutoencoderSize):
        for name in AutoencoderSize.model_fields:
            yield f"latent.{name}", getattr(plan.latent, name), getattr(recipe.latent, name)
        digest_in_plan = plan.file(plan.latent.path).digest
        yield "latent.weights, digest", digest_in_plan, recipe_autoencoder_digest(recipe)
    if isinstance(plan.latent, DiffusersKlLatent) and isinstance(recipe.latent, DiffusersKlRecipe):
        # takes seconds, and most recipes do without
        from ddm.encoders.public_autoencoder import describe

        folder = Path(recipe.latent.folder)
        described, weights = describe(folder, recipe.data.shape, recipe.latent.tile)
        for name in DiffusersKlLatent.model_fields:
            yield f"latent.{name}", getattr(plan.latent, name), getattr(described, name)
        weights_digest = plan.file(plan.latent.path).digest
        yield "latent.folder, digest", weights_digest, sha256_file(weights)

    # The number of fine centroids depends on the number of public images where the recipe does not state it.
    num_fine = plan.clustering.num_fine
    yield "clustering.num_fine", num_fine, recipe.clustering.num_fine or num_fine
