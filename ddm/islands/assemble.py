"""Makes one signed release of the islands that are trained: experts, router, shares, pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import link_or_copy, write_atomic
from ddm.io.space import require_free_space
from ddm.io.tensors import save_tensors
from ddm.islands.card import CARD_NAME, card
from ddm.islands.folder import Islands
from ddm.islands.keys import island_key
from ddm.islands.report import REPORT_NAME, report
from ddm.islands.router import OwnersRouter, exact_counts, fit_router
from ddm.loading.ensemble import build_ensemble
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import File, now_utc, sha256_file
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedExpert, PublishedRouter, PublishedSilo
from ddm.protocol.submission import SubmittedExpert, class_counts_path, expert_path, submission_path
from ddm.protocol.weight_privacy import NoWeightPrivacy
from ddm.publishing.drawing import Progress as DrawProgress
from ddm.publishing.keys import load_key
from ddm.publishing.pictured import draw_for
from ddm.publishing.publish import lay_out_plan, next_version, with_pages
from ddm.publishing.version import Version, memory_for, sign_version
from ddm.publishing.versions import manifest_digest, newest_version
from ddm.routers.base import Progress
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata

ROUTER_NAME = "router.safetensors"
_SMALL_BYTES = 64 * 1024**2  # documents and metadata of a version, and the largest router


@dataclass(frozen=True)
class Assembled:
    """What was published.

    Attributes:
        manifest: of this version.
        router: how the router did.
    """

    manifest: Manifest
    router: OwnersRouter


def missing_islands(islands: Islands) -> list[int]:
    """Return the numbers of the islands that are not trained yet."""
    return [
        number
        for number in range(len(islands.split.islands))
        if not islands.island(number).is_trained
    ]


def assemble(
    islands: Islands,
    out: Path,
    passphrase: bytes,
    *,
    partial: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_progress: Progress | None = None,
    on_draw: DrawProgress | None = None,
) -> Assembled:
    """Publish the next version, and copy it to `out`.

    Args:
        islands: the folder.
        out: a path where nothing exists.
        passphrase: opens the owner's keys.
        partial: publish without the islands that are not trained, shares renormalised.
        seed: of the router's training.
        device: where a router on images is trained.
        on_progress: called with the router's step, number of steps and held-out loss.
        on_draw: called, while images are drawn for the page, with the batches done and the batches in all.

    Raises:
        SetupError: islands are not trained, and `partial` is false; or none of them is.
        BusyError: `out` exists, or another process assembles.
        DigestError: an expert is not the one that was trained.
        PassphraseError: wrong passphrase.
    """
    missing, num = missing_islands(islands), len(islands.split.islands)
    if len(missing) == num or (missing and not partial):
        raise SetupError(
            f"{len(missing)} of {num} islands",
            expected="a trained expert"
            if len(missing) == num
            else "a trained expert, or --partial",
            got=f"none for {_numbers(missing)}",
            remedy=f"Train them: ddm train {islands.path}. One alone: --island {missing[0]}.",
        )
    with next_version(islands, out) as (change, reserved):
        present = [number for number in range(num) if number not in missing]
        size = sum(islands.trained(number).expert.bytes for number in present)
        require_free_space(
            {reserved.parent: size + _SMALL_BYTES, islands.path: _SMALL_BYTES}, "a release"
        )
        key = load_key(islands, "islands", passphrase)
        return _next_version(
            islands, present, key, change, passphrase, seed, device, on_progress, on_draw
        )


def _next_version(
    islands: Islands,
    present: Sequence[int],
    key: SigningKey,
    change: Change,
    passphrase: bytes,
    seed: int,
    device: torch.device | str,
    on_progress: Progress | None,
    on_draw: DrawProgress | None,
) -> Assembled:
    plan, number = islands.plan, newest_version(islands) + 1
    release = change.put(f"releases/{number}")
    targets = release / "targets" / plan.plan_id
    lay_out_plan(plan, islands.bundle, targets)
    files = PlanFiles.load(plan, targets)
    router = fit_router(islands, files, present, seed=seed, device=device, on_progress=on_progress)
    save_tensors(targets / ROUTER_NAME, router.tensors)
    silos, roles, exact = [], {}, exact_counts(islands).get("class_counts")
    for k in present:
        silo, role = _lay_out(islands, k, key, number, targets, None if exact is None else exact[k])
        silos.append(silo)
        roles[silo.silo_id] = role
    draft = _manifest(islands, present, silos, router, targets, number)
    root_digest = sha256_file(islands.tuf / "1.root.json")
    ensemble = build_ensemble(plan, draft, targets, memory_bytes=memory_for(draft), device=device)
    drawing = draw_for(plan, draft, ensemble, on_draw)
    trained = {islands.split.islands[k].island_id: islands.trained(k) for k in present}
    page = report(islands.split, plan, draft, router, trained, root_digest, drawing)
    write_atomic(targets / REPORT_NAME, page.encode())
    write_atomic(
        targets / CARD_NAME, card(islands.split, plan, draft, router, root_digest).encode()
    )
    manifest = with_pages(draft, (CARD_NAME, REPORT_NAME), targets)
    sign_version(Version(islands, change, release, manifest, roles), passphrase, now_utc())
    return Assembled(manifest, router)


def _lay_out(
    islands: Islands,
    number: int,
    source: SigningKey,
    sequence: int,
    targets: Path,
    exact_CG: Tensor | None,
) -> tuple[PublishedSilo, bytes]:
    """Put an island's expert, counts and document into the release; return its entry, and its signed metadata."""
    plan, split, record = islands.plan, islands.split, islands.trained(number)
    name = split.islands[number].island_id
    key = island_key(source, plan.plan_id, name)
    link_or_copy(islands.island(number).expert, targets / expert_path(name, name))
    counts = None
    if exact_CG is not None:
        counts = class_counts_path(name)
        save_tensors(targets / counts, {"counts": exact_CG})
    expert = SubmittedExpert(
        expert_id=name,
        cluster=number if split.by == "clusters" else None,
        num_images=record.num_images,
        steps=record.steps,
        file=record.expert,
        training=record.training,
        privacy=NoWeightPrivacy(),
    )
    document = Island(
        plan_id=plan.plan_id,
        plan_digest=split.plan_digest,
        silo_id=name,
        created_at=now_utc(),
        num_units=record.num_images,
        experts=(expert,),
        class_counts=File.of(counts, targets / counts) if counts else None,
        software={package: version(package) for package in ("archipelago", "torch")},
    )
    write_atomic(targets / submission_path(name), document.encode())
    submission = File.of(submission_path(name), targets / submission_path(name))
    listed = {
        f"{plan.plan_id}/{file.path}": (file.bytes, file.digest)
        for file in (submission, expert.file)
    }
    role = sign_silo_metadata(plan.plan_id, name, listed, key, version=sequence, now=now_utc())
    silo = PublishedSilo(
        silo_id=name,
        submission=submission,
        key_fingerprint=key.public.fingerprint,
        audit="none",
        isolation="none",
        units=record.num_images,
    )
    return silo, role


def _manifest(
    islands: Islands,
    present: Sequence[int],
    silos: Sequence[PublishedSilo],
    router: OwnersRouter,
    targets: Path,
    number: int,
) -> Manifest:
    """Describe everything but the pages, which are made from the manifest."""
    plan, split = islands.plan, islands.split
    total, names = sum(silo.units for silo in silos), {silo.silo_id for silo in silos}
    listed = ["plan.json", *(file.path for file in plan.files)]
    listed += [class_counts_path(name) for name in names] if plan.statistics.class_counts else []
    return Manifest(
        plan_id=plan.plan_id,
        plan_digest=split.plan_digest,
        version=number,
        supersedes_digest=manifest_digest(islands, number - 1),
        published_at=now_utc(),
        licence=split.licence,
        cite=split.cite,
        missing_silos=tuple(name for name in plan.silos if name not in names),
        withdrawn_silos=(),
        silos=tuple(silos),
        experts=tuple(
            PublishedExpert(
                expert_id=silo.silo_id,
                silo_id=silo.silo_id,
                cluster=k if split.by == "clusters" else None,
                prior=silo.units / total,
                file=islands.trained(k).expert,
            )
            for k, silo in zip(present, silos, strict=True)
        ),
        router=PublishedRouter(
            kind=router.kind,
            t_release=None,
            training_prior=(1.0 / len(silos),) * len(silos),
            temperature=router.calibration.temperature,
            file=File.of(ROUTER_NAME, targets / ROUTER_NAME),
        ),
        evaluation=router.evaluation,
        files=tuple(File.of(name, targets / name) for name in sorted(listed)),
    )


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:20]))
    return f"{shown}, …" if len(numbers) > 20 else shown
