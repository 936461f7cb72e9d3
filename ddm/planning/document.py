"""Writes the plan around what was fitted: the fields that a federation and one owner fill alike."""

import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddm.loading.plan import CENTROIDS_PATH, SKETCH_PATH
from ddm.planning.fit import PublicParts
from ddm.planning.recipe import SharedRecipe
from ddm.protocol.base import File, now_utc
from ddm.protocol.partition import Clustering, SketchSpec
from ddm.protocol.plan import Plan


def plan_of(
    recipe: SharedRecipe,
    fitted: PublicParts,
    folder: Path,
    *,
    name: str,
    root_digest: str,
    valid_for: timedelta,
    **own: Any,
) -> Plan:
    """Return the plan that a recipe asks for, with a new id, its files pinned by digest.

    The recipe's terms are copied, unless `own` has another value.

    Args:
        recipe: what is asked for.
        fitted: what was fitted, whose files are in `folder`.
        folder: holds `plan/*.safetensors`.
        name: the name of the federation or the owner, with which the plan's id begins.
        root_digest: sha256 of the federation's first root.
        valid_for: from now until the plan expires.
        own: the plan's other fields: who trains, on which terms, with which statistics.
    """
    created = now_utc()
    files = tuple(File.of(path, folder / path) for path in fitted.paths)
    # Of equal names the later one counts: islands have a partition of their own, a federation's experts an adaptation.
    terms = recipe.terms | own
    if fitted.base is not None:
        terms["expert"] = fitted.base.fit_positions(
            terms["expert"], fitted.latent.shape(recipe.data.shape)
        )
        (base_file,) = [file for file in files if file.path == terms["expert"].base]
        terms["base"] = fitted.base.describe(base_file.digest, fitted.latent)
    return Plan(
        root_digest=root_digest,
        plan_id=f"{name}-{secrets.token_hex(4)}",
        created_at=created,
        expires_at=created + valid_for,
        files=files,
        latent=fitted.latent,
        encoder=fitted.encoder,
        clustering=Clustering(
            path=CENTROIDS_PATH,
            num_fine=fitted.num_fine,
            num_coarse=recipe.clustering.num_coarse,
            balanced=recipe.clustering.balanced,
        ),
        sketch=SketchSpec(path=SKETCH_PATH, rank=recipe.sketch.rank),
        condition=fitted.condition,
        **terms,
    )
