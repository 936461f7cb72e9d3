"""Takes over experts of the plan in force into the next one, with the public files that give them their meaning.

Only the plan in force can be carried from. When a plan is replaced, the roles that its successor does not carry go from
the snapshot for good, so that nobody brings back what a silo withdrew; what the plan in force carries itself goes on.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.config import Federation
from aggregator.intake.examination import public_images
from aggregator.intake.inventory import Inventory, take_inventory
from aggregator.keys.silo_rotation import cards_for_next_plan
from aggregator.planning.recipe import Recipe
from ddm.errors import PolicyError, SetupError
from ddm.io.files import link_or_copy
from ddm.loading.plan import PlanFiles
from ddm.planning.fit import Fitted, PublicImages, condition_of, write_base
from ddm.planning.recipe import DiffusersKlRecipe, HogRecipe, PcaRecipe, TimmRecipe
from ddm.protocol.base import sha256_file
from ddm.protocol.carried import Carried
from ddm.protocol.encoder import HogEncoder, TimmEncoder
from ddm.protocol.enrolment import Agreed
from ddm.protocol.growth import check_carried, check_consent
from ddm.protocol.latent import Autoencoder, AutoencoderKlLatent, AutoencoderSize, DiffusersKlLatent
from ddm.protocol.plan import Plan


@dataclass(frozen=True)
class Carrying:
    """What the next plan takes over.

    Attributes:
        plan: the plan in force.
        carried: the silos whose experts go on.
        agreed: their agreed sizes.
        earlier: the plans for which these silos trained, by id.
        folder: holds the plan's `plan.json` and `plan/`.
    """

    plan: Plan
    carried: tuple[Carried, ...]
    agreed: Mapping[str, Agreed]
    earlier: Mapping[str, Plan]
    folder: Path

    def check(self, new: Plan) -> None:
        """Refuse a plan in which a carried expert would mean something else than where it was trained.

        Raises:
            ReplayError: names the field.
        """
        for each in self.carried:
            check_carried(each, self.earlier[each.plan_id], new)


def choose_carried(federation: Federation, plan_id: str, replaced: Collection[str]) -> Carrying:
    """Choose the accepted silos of the plan in force whose experts go on: all that were not withdrawn, except some.

    Args:
        federation: the operator's folder.
        plan_id: the plan in force.
        replaced: silos that train again.

    Raises:
        SetupError: another plan is in force, nothing was accepted, or a silo to replace has no accepted submission.
        ReplayError: a silo has not consented to later plans.
        PolicyError: the agreed size of a silo changed since.
    """
    plan, digest = federation.current_plan()
    if plan.plan_id != plan_id:
        raise SetupError(
            f"--carry {plan_id[:80]}",
            expected=f"the plan in force, {plan.plan_id}, which also goes on with what it carries itself",
            got="another plan",
            remedy=f"Use --carry {plan.plan_id}. What a plan in force did not carry over has to be trained again.",
        )
    inventory = take_inventory(federation)
    if unknown := sorted(set(replaced) - inventory.silos.keys()):
        expected = f"silos with an accepted submission: {', '.join(inventory.silos)}"
        raise SetupError("--replace", expected=expected, got=", ".join(unknown)[:200])
    own = Carried(silo_id="a", plan_id=plan.plan_id, plan_digest=digest, submission_digest=digest)
    before = {each.silo_id: each for each in plan.carried}
    found = []
    for silo_id, silo in inventory.silos.items():
        if silo_id not in replaced:
            carried = before.get(silo_id, own)
            found.append(
                carried.model_copy(update={"silo_id": silo_id, "submission_digest": silo.digest})
            )
            check_consent(found[-1], silo.submission)
    if not found:
        expected, got = (
            f"an accepted silo of {plan.plan_id} to carry over",
            "none: --replace names all of them",
        )
        raise SetupError("--carry", expected=expected, got=got)
    _check_sizes(federation, inventory, found)
    folder = federation.plan_targets(plan.plan_id)
    earlier = {each.plan_id: _earlier(plan, folder, each) for each in found}
    return Carrying(
        plan,
        tuple(found),
        {each.silo_id: plan.agreed[each.silo_id] for each in found},
        earlier,
        folder,
    )


def _earlier(plan: Plan, folder: Path, carried: Carried) -> Plan:
    if carried.plan_id == plan.plan_id:
        return plan
    return Plan.parse((folder / carried.plan_path).read_bytes(), subject=carried.plan_path)


def _check_sizes(federation: Federation, inventory: Inventory, carried: list[Carried]) -> None:
    following = cards_for_next_plan(federation, [each.silo_id for each in carried])
    for each in carried:
        stated, now = inventory.plan.agreed[each.silo_id], following[each.silo_id].agreed
        if stated != now:
            raise PolicyError(
                f"agreed size of {each.silo_id}, to be carried over",
                expected=f"{stated}, as in the plan for which it trained",
                got=f"{now} on its present card",
                remedy=f"Let it train again, so that the new size counts: --replace {each.silo_id}.",
            )


def reuse_public(
    federation: Federation, recipe: Recipe, carrying: Carrying, folder: Path
) -> Fitted:
    """Take encoder, centroids, sketch and autoencoder over into `folder`, with the public images; nothing is fitted.

    Raises:
        SetupError: the recipe asks for others.
        MissingFileError, TensorFileError: see `ddm.planning.fit.fit_public`.
    """
    plan = carrying.plan
    for field, before, asked in _unlike(recipe, plan):
        raise SetupError(
            f"recipe, {field}",
            expected=f"{before}, as in plan {plan.plan_id}, whose experts go on",
            got=f"{asked}",
            remedy="Experts go on only with the public files that give them their meaning: keep what the earlier "
            "recipe states, or sign a plan without --carry, for which every silo trains again.",
        )
    parts = [plan.encoder.path, plan.clustering.path, plan.sketch.path]
    parts += [plan.latent.path] if isinstance(plan.latent, Autoencoder) else []
    for path in parts:
        link_or_copy(carrying.folder / path, folder / path)
    for each in carrying.carried:
        source = carrying.folder / ("plan.json" if each.plan_id == plan.plan_id else each.plan_path)
        if not (folder / each.plan_path).exists():
            link_or_copy(source, folder / each.plan_path)
    images = _images(federation, plan)
    condition = condition_of(recipe)
    paths = [
        *parts,
        *{each.plan_path for each in carrying.carried},
        *write_base(recipe, images, condition, folder),
    ]
    files = PlanFiles.load(plan, carrying.folder)
    return Fitted(
        images=images,
        paths=tuple(sorted(paths)),
        encoder=plan.encoder,
        latent=plan.latent,
        num_fine=plan.clustering.num_fine,
        condition=condition,
        sketch=files.sketch,
        network=files.encoder,
        clusters=files.clusters,
        autoencoder=files.latent,
    )


def _images(federation: Federation, plan: Plan) -> PublicImages:
    fitted, holdout = (
        public_images(federation, plan.plan_id, part, as_latents=False)
        for part in ("fitted", "holdout")
    )
    if not isinstance(plan.latent, Autoencoder):
        return PublicImages(fitted, holdout)
    latents = (
        public_images(federation, plan.plan_id, "fitted"),
        public_images(federation, plan.plan_id, "holdout"),
    )
    return PublicImages(fitted, holdout, latents)


def _unlike(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a recipe asks of the public parts that these do not have; the plan shows whatever else differs."""
    wanted, encoder = recipe.encoder, plan.encoder
    asked: list[tuple[str, Any, Any]] = [("encoder.kind", encoder.kind, wanted.kind)]
    if isinstance(wanted, PcaRecipe | HogRecipe):
        asked.append(("encoder.dim", encoder.dim, wanted.dim))
    if isinstance(wanted, HogRecipe) and isinstance(encoder, HogEncoder):
        asked += [
            (f"encoder.{name}", getattr(encoder, name), getattr(wanted, name))
            for name in ("cells", "mirrored")
        ]
    if isinstance(wanted, TimmRecipe) and isinstance(encoder, TimmEncoder):
        asked.append(("encoder.model", encoder.model, wanted.model))
        asked.append(
            ("encoder.image_size", encoder.image_size, wanted.image_size or encoder.image_size)
        )
    asked.append(("latent.kind", plan.latent.kind, recipe.latent.kind))
    if isinstance(plan.latent, AutoencoderKlLatent) and isinstance(recipe.latent, AutoencoderSize):
        sizes = AutoencoderSize.model_fields
        asked += [
            (f"latent.{name}", getattr(plan.latent, name), getattr(recipe.latent, name))
            for name in sizes
        ]
    elif isinstance(plan.latent, DiffusersKlLatent) and isinstance(
        recipe.latent, DiffusersKlRecipe
    ):
        from ddm.encoders.public_autoencoder import (
            describe,  # takes seconds, and most recipes do without
        )

        spec, weights = describe(Path(recipe.latent.folder), recipe.data.shape, recipe.latent.tile)
        factors = DiffusersKlLatent.model_fields
        asked += [
            (f"latent.{name}", getattr(plan.latent, name), getattr(spec, name)) for name in factors
        ]
        asked.append(
            ("latent.folder, digest", plan.file(plan.latent.path).digest, sha256_file(weights))
        )
    num_fine = recipe.clustering.num_fine
    asked.append(
        ("clustering.num_fine", plan.clustering.num_fine, num_fine or plan.clustering.num_fine)
    )
    return ((field, before, now) for field, before, now in asked if before != now)
