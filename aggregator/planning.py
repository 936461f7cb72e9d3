"""From a recipe and public images to a signed plan: fit what is public, show what it will cost, sign."""

import io
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.recipe import Recipe
from aggregator.registry import cards, signing_key
from aggregator.setup import load_key
from ddm.clustering import fit_clustering
from ddm.encoders import PcaEncoder
from ddm.errors import SetupError
from ddm.files import link_or_copy, locked, sync_folder, sync_tree, write_atomic
from ddm.models import build_expert, num_parameters
from ddm.plan_files import CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH, release_noise_level
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.plan import Clustering, IdentityLatent, NoCondition, Objective, Plan
from ddm.protocol.plan import PcaEncoder as PcaSpec
from ddm.schedule import LinearPath
from ddm.sketch import Sketch
from ddm.tensors import save_tensors
from ddm.training import train
from ddm.trust.repository import Repository

TIMED_STEPS = 12


@dataclass(frozen=True)
class Draft:
    """A plan that is ready to be signed, and what it will cost.

    Attributes:
        plan: the document.
        folder: holds `plan/*.safetensors` as the plan lists them.
        holdout: public images kept back to judge the routers, shape (N, C, H, W).
        t_release: noise level at which sketches leave.
        expert_bytes: size of one expert.
        train_s: seconds that the expert's training would take here, one thread, measured on a few steps.
    """

    plan: Plan
    folder: Path
    holdout: Tensor
    t_release: float
    expert_bytes: int
    train_s: float


def draft_plan(federation: Federation, recipe: Recipe, public: Tensor, folder: Path) -> Draft:
    """Fit the public parts into `folder` and write the plan around them; nothing is signed yet.

    Raises:
        SetupError: no silo is enrolled.
        DataError: too few public images for the recipe.
    """
    silos = tuple(sorted(cards(federation)))
    if not silos:
        raise SetupError("plan", expected="enrolled silos", got="none", remedy="Enroll them: aggregator enroll.")
    generator = torch.Generator().manual_seed(recipe.public.seed)
    order = torch.randperm(len(public), generator=generator)
    num_holdout = int(len(public) * recipe.public.holdout_share)
    fit, holdout = public[order[num_holdout:]], public[order[:num_holdout]]
    sketch = _fit_public_parts(recipe, fit, folder)
    created = now_utc()
    plan = Plan(
        plan_id=f"{federation.settings().name}-{secrets.token_hex(4)}",
        created_at=created,
        expires_at=created + timedelta(days=recipe.valid_days),
        silos=silos,
        receipt_key=(federation.keys / "receipts.pub").read_text("ascii").strip(),
        files=tuple(File.of(path, folder / path) for path in (CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH)),
        data=recipe.data,
        latent=IdentityLatent(),
        encoder=PcaSpec(path=ENCODER_PATH, dim=recipe.encoder.dim),
        clustering=Clustering(
            path=CENTROIDS_PATH, num_fine=recipe.clustering.num_fine, num_coarse=recipe.clustering.num_coarse
        ),
        partition=recipe.partition,
        objective=Objective(),
        t_distribution=recipe.t_distribution,
        condition=NoCondition(),
        expert=recipe.expert,
        releases=recipe.releases,
        router=recipe.router,
        audit=recipe.audit,
        limits=recipe.limits,
    )
    expert = build_expert(plan.expert.architecture, plan.data.shape)
    return Draft(
        plan=plan,
        folder=folder,
        holdout=holdout,
        t_release=release_noise_level(plan, sketch),
        expert_bytes=4 * num_parameters(expert),
        train_s=_measure_training(plan, fit),
    )


def _fit_public_parts(recipe: Recipe, fit: Tensor, folder: Path) -> Sketch:
    num_groups = recipe.releases.counts.num_groups
    encoder = PcaEncoder.fit(fit, recipe.encoder.dim)
    features = encoder.encode(fit)
    fine, coarse = recipe.clustering.num_fine, recipe.clustering.num_coarse
    clusters = fit_clustering(features, fine, coarse, num_groups, seed=recipe.public.seed)
    group_N = clusters.group_F[clusters.assign(features)]
    sketch = Sketch.fit(fit, group_N, recipe.releases.sketch.rank, num_groups)
    for path, part in ((ENCODER_PATH, encoder), (CENTROIDS_PATH, clusters), (SKETCH_PATH, sketch)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / path, part.tensors())
    return sketch


def _measure_training(plan: Plan, images: Tensor) -> float:
    """Time a few real training steps here, one thread, and scale; what a silo's machine needs may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = plan.expert.training.model_copy(update={"num_steps": TIMED_STEPS, "checkpoint_steps": TIMED_STEPS})
        expert = build_expert(plan.expert.architecture, plan.data.shape)
        with tempfile.TemporaryDirectory() as scratch:
            trained = train(
                expert,
                images,
                settings,
                LinearPath(),
                plan.t_distribution,
                checkpoint_dir=Path(scratch),
                on_progress=lambda progress: None,
                should_stop=lambda: False,
            )
    finally:
        torch.set_num_threads(threads)
    return trained.seconds / TIMED_STEPS * plan.expert.training.num_steps


def sign_plan(federation: Federation, draft: Draft, passphrase: bytes) -> str:
    """Sign the plan, lay out the bundle that silos are sent, make the plan current; return its digest.

    The TUF repository turns to the plan only after everything else lies on disk, and `current.json` only after that.
    Stopped before, the old plan works on; stopped between, `Federation.current_plan` asks to sign again.

    Raises:
        BusyError: `aggregator run` is at work on the plan that this one replaces.
        SetupError: submissions accepted for that plan are in no release, and could never be published afterwards.
    """
    with locked(federation.accepted, "intake"):
        _check_published(federation)
        plan, encoded = draft.plan, draft.plan.encode()
        part = _lay_out(federation, draft, encoded)
        _start(federation, plan, encoded, passphrase).export_bundle(part / "bundle")
        home = federation.plan_folder(plan.plan_id)
        part.rename(home)
        sync_folder(home.parent)
        digest = sha256_hex(encoded)
        federation.set_current(plan.plan_id, digest)
        return digest


def _check_published(federation: Federation) -> None:
    try:
        plan, _ = federation.current_plan()
    except SetupError:
        return  # no plan yet, or one that can no longer be published
    accepted = federation.accepted / plan.plan_id
    releases = [path for path in federation.releases.glob("[0-9]*") if path.name.isdigit()]
    published = {path.name for release in releases for path in release.glob(f"targets/{plan.plan_id}/silos/*")}
    waiting = {silo_id for silo_id in plan.silos if (accepted / silo_id).is_dir()} - published
    if waiting:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="every accepted submission in a release before the next plan",
            got=f"none with that of {', '.join(sorted(waiting))}",
            remedy="Publish first: aggregator router, then aggregator publish.",
        )


def _start(federation: Federation, plan: Plan, encoded: bytes, passphrase: bytes) -> Repository:
    files = {f"{plan.plan_id}/plan.json": (len(encoded), sha256_hex(encoded))}
    files |= {f"{plan.plan_id}/{file.path}": (file.bytes, file.digest) for file in plan.files}
    repository = Repository(federation.tuf)
    enrolled = cards(federation)
    repository.start_plan(
        plan.plan_id,
        {silo_id: signing_key(enrolled[silo_id]) for silo_id in plan.silos},
        files,
        targets_keys=[load_key(federation, "targets", passphrase)],
        plans_key=load_key(federation, "plans", passphrase),
        release_key=load_key(federation, "release", passphrase),
        online_key=load_key(federation, "online", passphrase),
        now=now_utc(),
    )
    return repository


def _lay_out(federation: Federation, draft: Draft, encoded: bytes) -> Path:
    """Put everything but the signatures where it is renamed to its place later."""
    home = federation.plan_folder(draft.plan.plan_id)
    for stale in home.parent.glob("*.part"):
        shutil.rmtree(stale)
    part = home.with_suffix(".part")
    targets = part / "bundle" / "targets" / draft.plan.plan_id
    for file in draft.plan.files:
        link_or_copy(draft.folder / file.path, targets / file.path)
    write_atomic(targets / "plan.json", encoded)
    holdout = io.BytesIO()
    np.savez_compressed(holdout, images=draft.holdout.numpy())
    write_atomic(part / "holdout.npz", holdout.getvalue())
    sync_tree(part)
    return part
