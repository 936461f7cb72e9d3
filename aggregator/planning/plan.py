"""From a recipe and public images to a signed plan: fit what is public, show what it will cost, sign."""

import io
import secrets
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aggregator.changes import Change
from aggregator.config import PUBLIC_NAME, CurrentPlan, Federation
from aggregator.keys.ceremony import check_replaceable, conduct
from aggregator.keys.rotation import next_receipts_key, use_next_receipts_key
from aggregator.membership.registry import card_of, cards, signing_key
from aggregator.planning.recipe import AutoencoderKlRecipe, PcaRecipe, Recipe, TextRecipe
from ddm.diffusion.path import path_named
from ddm.encoders import Encoder, PcaEncoder, Progress
from ddm.encoders.autoencoder import AutoencoderKl, Identity, Latent, open_weights, spread
from ddm.errors import DataError, SetupError
from ddm.io.files import link_or_copy, require_file, write_atomic
from ddm.io.locks import locked
from ddm.io.tensors import load_tensors, save_tensors
from ddm.loading.plan import CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH, sketch_noise_level
from ddm.models import MAX_WEIGHT, build_expert, empty_expert, expected_tensors, num_parameters
from ddm.partition.clustering import fit_clustering
from ddm.privacy.plan_cost import check_total, plan_epsilon
from ddm.protocol.base import File, now_utc
from ddm.protocol.latent import AUTOENCODER_PATH, AutoencoderSize
from ddm.protocol.plan import (
    AutoencoderKlLatent,
    Clustering,
    Condition,
    IdentityLatent,
    Plan,
    SketchSpec,
    TextCondition,
    TimmEncoder,
    most_experts,
)
from ddm.protocol.plan import PcaEncoder as PcaSpec
from ddm.routers.sketch import Sketch
from ddm.training.config import Engine
from ddm.training.loop import train
from ddm.trust.ceremony import Request
from ddm.trust.repository import Repository

TIMED_STEPS = 12
FEWEST_HELD_OUT = 20  # public images that judge and calibrate the routers


@dataclass(frozen=True)
class Draft:
    """A plan that is ready to be signed, and what it will cost.

    Attributes:
        plan: the document.
        folder: holds `plan/*.safetensors` as the plan lists them.
        fitted: public images that encoder, clusters and sketch were fitted on, shape (N, C, H, W).
        holdout: public images kept back to judge the routers, shape (N, C, H, W).
        t_release: noise level at which sketches leave; None where none do.
        epsilon: what all statistics cost together at the total's delta.
        expert_bytes: size of one expert.
        num_experts: most experts that a silo may have.
        train_s: seconds that training all of these would take here, one thread, measured on a few steps.
        latents: of the images fitted on and of those kept back, as experts see them; None where they see the images.
    """

    plan: Plan
    folder: Path
    fitted: Tensor
    holdout: Tensor
    t_release: float | None
    epsilon: float
    expert_bytes: int
    num_experts: int
    train_s: float
    latents: tuple[Tensor, Tensor] | None = None


def draft_plan(
    federation: Federation, recipe: Recipe, public: Tensor, folder: Path, on_progress: Progress | None = None
) -> Draft:
    """Fit the public parts into `folder` and write the plan around them; nothing is signed yet.

    Args:
        federation: whose plan it becomes.
        recipe: what the operator asks for.
        public: public images, shape (N, C, H, W).
        folder: where the plan's files go.
        on_progress: told of images encoded, which is long with a large network.

    Raises:
        SetupError: no silo is enrolled, the encoder's weights are not there, or no text encoder in the folder named.
        TensorFileError: the autoencoder's weights are not what the recipe's sizes imply.
        DataError: too few public images for the recipe.
        PolicyError: the statistics cost more than the total that the recipe states.
    """
    silos = tuple(sorted(cards(federation)))
    if not silos:
        raise SetupError("plan", expected="enrolled silos", got="none", remedy="Enroll them: aggregator enroll.")
    generator = torch.Generator().manual_seed(recipe.public.seed)
    order = torch.randperm(len(public), generator=generator)
    num_holdout = int(len(public) * recipe.public.holdout_share)
    if num_holdout < FEWEST_HELD_OUT:
        expected = f"at least {FEWEST_HELD_OUT} to hold out, as the share public.holdout_share"
        raise DataError("public images", expected=expected, got=f"{num_holdout} of {len(public)}")
    fit, holdout = public[order[num_holdout:]], public[order[:num_holdout]]
    condition = _condition(recipe)
    encoder, spec = _open_encoder(recipe, fit)
    num_fine = recipe.clustering.fine_for(len(fit), recipe.statistics.counts.num_groups)
    latent, latent_spec, latents = _open_latent(recipe, fit, holdout, on_progress)
    seen = latents[0] if latents else fit
    sketch = _fit_public_parts(recipe, encoder, num_fine, fit, seen, folder, on_progress)
    paths = [CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH]
    if isinstance(latent, AutoencoderKl):
        save_tensors(folder / AUTOENCODER_PATH, latent.tensors())
        paths.append(AUTOENCODER_PATH)
    if recipe.base and recipe.expert.base:
        save_tensors(folder / recipe.expert.base, _open_base(recipe, recipe.base, seen, condition))
        paths.append(recipe.expert.base)
    created = now_utc()
    plan = Plan(
        plan_id=f"{federation.settings().name}-{secrets.token_hex(4)}",
        created_at=created,
        expires_at=created + timedelta(days=recipe.valid_days),
        silos=silos,
        receipt_key=str(next_receipts_key(federation)),
        files=tuple(File.of(path, folder / path) for path in sorted(paths)),
        data=recipe.data,
        latent=latent_spec,
        encoder=spec,
        clustering=Clustering(
            path=CENTROIDS_PATH,
            num_fine=num_fine,
            num_coarse=recipe.clustering.num_coarse,
            balanced=recipe.clustering.balanced,
        ),
        sketch=SketchSpec(path=SKETCH_PATH, rank=recipe.sketch.rank),
        partition=recipe.partition,
        objective=recipe.objective,
        t_distribution=recipe.t_distribution,
        condition=condition,
        expert=recipe.expert,
        statistics=recipe.statistics,
        router=recipe.router,
        audit=recipe.audit,
        limits=recipe.limits,
    )
    check_total(plan)
    expert = empty_expert(plan.expert.architecture, plan.expert_shape, plan.condition)
    num_experts = most_experts(plan)
    return Draft(
        plan=plan,
        folder=folder,
        fitted=fit,
        holdout=holdout,
        t_release=sketch_noise_level(plan, sketch),
        epsilon=plan_epsilon(plan),
        expert_bytes=4 * num_parameters(expert),
        num_experts=num_experts,
        train_s=num_experts * _measure_training(plan, seen),
        latents=latents,
    )


def _open_encoder(recipe: Recipe, fit: Tensor) -> tuple[Encoder, PcaSpec | TimmEncoder]:
    """Fit or load the encoder, and write down what the plan says of it."""
    asked = recipe.encoder
    if isinstance(asked, PcaRecipe):
        return PcaEncoder.fit(fit, asked.dim), PcaSpec(path=ENCODER_PATH, dim=asked.dim)
    from ddm.encoders.timm import TimmEncoder as Network  # takes seconds, and most recipes do without

    if asked.weights is None:
        network = Network.random(asked.model, recipe.data, asked.seed, asked.image_size)
    else:
        weights = require_file(Path(asked.weights), f"the weights of {asked.model}")
        network = Network.from_file(asked.model, weights, recipe.data, asked.image_size)
    return network, network.spec


def _condition(recipe: Recipe) -> Condition:
    """Return what experts are told, a text's encoder pinned by the digests of its files."""
    asked = recipe.condition
    if not isinstance(asked, TextRecipe):
        return asked
    from ddm.encoders.text import pin  # takes seconds, and most recipes do without

    return pin(Path(asked.encoder), max_tokens=asked.max_tokens, drop=asked.drop)


def _open_latent(
    recipe: Recipe, fit: Tensor, holdout: Tensor, on_progress: Progress | None
) -> tuple[Latent, IdentityLatent | AutoencoderKlLatent, tuple[Tensor, Tensor] | None]:
    """Open the autoencoder, measure how wide its latents are on the images that the plan is fitted on, encode all."""
    asked = recipe.latent
    if not isinstance(asked, AutoencoderKlRecipe):
        return Identity(), asked, None
    weights = require_file(Path(asked.weights), "the weights of the autoencoder")
    opened = open_weights(weights, asked, recipe.data.shape)
    raw_fit, raw_holdout = opened.encode(fit, on_progress), opened.encode(holdout, on_progress)
    scale = spread(raw_fit)
    sizes = {name: getattr(asked, name) for name in AutoencoderSize.model_fields}
    return opened, AutoencoderKlLatent(**sizes, scale=scale), (raw_fit / scale, raw_holdout / scale)


def _open_base(recipe: Recipe, weights: str, seen: Tensor, condition: Condition) -> dict[str, Tensor]:
    """Load the public expert that training starts from; it must be what the recipe asks to be trained."""
    path = require_file(Path(weights), "the public expert that training starts from")
    specs = expected_tensors(recipe.expert.architecture, tuple(seen.shape[1:]), condition)
    return load_tensors(path, specs, max_bytes=path.stat().st_size, max_abs=MAX_WEIGHT)


def _fit_public_parts(
    recipe: Recipe,
    encoder: Encoder,
    num_fine: int,
    fit: Tensor,
    seen: Tensor,
    folder: Path,
    on_progress: Progress | None,
) -> Sketch:
    """Fit clusters on features of images, and the sketch on what experts see of them; write all three."""
    statistics, clustering = recipe.statistics, recipe.clustering
    num_groups = statistics.counts.num_groups
    features = encoder.encode(fit, on_progress)
    clusters = fit_clustering(
        features, num_fine, clustering.num_coarse, num_groups, seed=recipe.public.seed, balanced=clustering.balanced
    )
    group_N = clusters.group_F[clusters.assign(features)]
    released = max((part.rank for part in (statistics.sketch, statistics.moments) if part), default=recipe.sketch.rank)
    sketch = Sketch.fit(seen, group_N, recipe.sketch.rank, num_groups, released_rank=released)
    for path, part in ((ENCODER_PATH, encoder), (CENTROIDS_PATH, clusters), (SKETCH_PATH, sketch)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / path, part.tensors())
    return sketch


def _measure_training(plan: Plan, seen: Tensor) -> float:
    """Time a few real training steps here, one thread, and scale; what a silo's machine needs may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = plan.expert.training.model_copy(update={"num_steps": TIMED_STEPS, "checkpoint_steps": TIMED_STEPS})
        condition = plan.condition
        expert = build_expert(plan.expert.architecture, plan.expert_shape, condition=condition)
        told = None
        if isinstance(condition, TextCondition):  # whose tokens cost as much as the image's
            seen = seen[: plan.expert.training.batch_size]
            told = torch.ones(len(seen), condition.max_tokens, condition.dim)
        with tempfile.TemporaryDirectory() as scratch:
            trained = train(
                expert,
                seen,
                settings,
                path_named(plan.objective.path),
                plan.t_distribution,
                checkpoint_dir=Path(scratch),
                on_progress=lambda progress: None,
                should_stop=lambda: False,
                labels=told,
                engine=Engine(device="cpu"),
            )
    finally:
        torch.set_num_threads(threads)
    return trained.seconds / TIMED_STEPS * plan.expert.training.num_steps


def sign_plan(federation: Federation, draft: Draft, passphrase: bytes) -> list[str]:
    """Sign the plan, lay out the bundle that silos are sent, make the plan current.

    All of it comes into force at once, after the holders of `targets` have signed; until then the old plan works on.

    Returns:
        Whose signatures are waited for, in words; nothing when the plan is current.

    Raises:
        BusyError: `aggregator run` is at work on the plan that this one replaces, or another change is under way.
        SetupError: submissions accepted for that plan are in no release, or the draft names a key that was rotated.
        MissingFileError: a silo of the draft is not enrolled any more.
    """
    with locked(federation.accepted, "intake"), federation.signing_lock():
        check_replaceable(federation)
        plan = draft.plan
        if plan.receipt_key != str(next_receipts_key(federation)):
            raise SetupError(f"plan {plan.plan_id}", expected="the present receipts key", got="one that was rotated")
        change = Change.begin(federation.path)
        _lay_out(draft, change.put(f"plans/{plan.plan_id}"))
        current = CurrentPlan(plan_id=plan.plan_id, plan_digest=plan.digest)
        write_atomic(change.put("plans/current.json"), current.encode())
        use_next_receipts_key(federation, change)
        repository = Repository(federation.tuf)
        silos = {silo_id: signing_key(card_of(federation, silo_id)) for silo_id in plan.silos}
        delegates = replace(repository.delegates(), plan_id=plan.plan_id, silos=silos)
        targets = repository.next_targets(delegates, now_utc())
        purpose = f"start the plan {plan.plan_id}"
        request = Request.to_sign(targets, purpose, repository.targets(), repository.root())
        return conduct(federation, change, [request], passphrase, act="plan", purpose=purpose, plan_id=plan.plan_id)


def _lay_out(draft: Draft, home: Path) -> None:
    """Put everything but the signatures where it comes into force with them."""
    targets = home / "bundle" / "targets" / draft.plan.plan_id
    for file in draft.plan.files:
        link_or_copy(draft.folder / file.path, targets / file.path)
    write_atomic(targets / "plan.json", draft.plan.encode())
    public = io.BytesIO()
    arrays = {"fitted": draft.fitted, "holdout": draft.holdout}
    if draft.latents:
        arrays |= {"fitted_latents": draft.latents[0], "holdout_latents": draft.latents[1]}
    np.savez_compressed(public, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    write_atomic(home / PUBLIC_NAME, public.getvalue())
