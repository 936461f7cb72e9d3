"""Makes one signed release of the islands that are trained: experts, router, shares, pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.errors import DigestError, SetupError
from ddm.io.files import link_or_copy, write_atomic
from ddm.io.tensors import save_tensors
from ddm.islands.folder import Islands, Split
from ddm.islands.keys import island_key, sign_first_plan
from ddm.islands.router import RouterFit, RouterTraining, exact_counts, fit_router
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import File, sha256_file
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.protocol.router_report import RouterReport
from ddm.protocol.submission import (
    SubmittedExpert,
    class_counts_path,
    expert_path,
    submission_path,
)
from ddm.protocol.weight_privacy import NoWeightPrivacy
from ddm.publishing.contents import (
    ROUTER_NAME,
    DataDivision,
    ReleaseContents,
    ReleaseMember,
    draft_manifest,
    plan_sources,
)
from ddm.publishing.keys import load_key
from ddm.publishing.signing import complete_version
from ddm.publishing.staging import StagedVersion, stage_version
from ddm.routers.base import LossCallback
from ddm.system.progress import ProgressCallback
from ddm.system.version import software_versions
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata

_MAX_NAMED_ISLANDS = 20
_DIVISIONS = {
    "clusters": "The data set was divided by clusters of features: {fine} fine centroids, joined to {num} islands.",
    "random": "The data set was divided at random into {num} islands, the control for clusters.",
    "column": "The data set was divided into {num} islands by the values of the column {column}.",
}


@dataclass(frozen=True)
class AssemblySettings:
    """How a release of islands is made.

    Attributes:
        partial: publish without the islands that are not trained, shares renormalised.
        seed: the seed of the router's training.
        device: where a router on images is trained, and where images are drawn for the report.
        on_router_step: called with the router's step, number of steps and held-out loss.
        on_draw: called, while images are drawn for the report, with the batches done and the batches in all.
    """

    partial: bool = False
    seed: int = 0
    device: torch.device | str = "cpu"
    on_router_step: LossCallback | None = None
    on_draw: ProgressCallback | None = None


@dataclass(frozen=True)
class AssembledRelease:
    """What was published.

    Attributes:
        manifest: the manifest of this version.
        router: how the router did.
    """

    manifest: Manifest
    router: RouterReport


def missing_islands(islands: Islands) -> list[int]:
    """Return the numbers of the islands that are not trained yet."""
    numbers = range(len(islands.split.islands))
    return [number for number in numbers if not islands.island(number).is_trained]


def assemble(
    islands: Islands, out: Path, passphrase: bytes, settings: AssemblySettings = AssemblySettings()
) -> AssembledRelease:
    """Publish the next version, and copy it to `out`.

    Args:
        islands: the folder.
        out: a path where nothing exists.
        passphrase: opens the owner's keys.
        settings: how it is made.

    Raises:
        SetupError: islands are not trained, and the release is not `partial`; or none of them is.
        BusyError: `out` exists, or another process assembles.
        DigestError: an expert is not the one that was trained, or the seed not the one of the signed plan.
        PassphraseError: wrong passphrase.
    """
    # Checked before the lock is taken and the router trained, which takes minutes.
    present = _trained_islands(islands, partial=settings.partial)
    if islands.start_from_seed:
        _sign_plan_of_seed(islands, passphrase)
    with stage_version(islands, out) as version:
        version.require_space(sum(islands.trained(number).expert.bytes for number in present))
        members = _sign_islands(islands, present, version, passphrase)
        router = _train_router(islands, present, members, version, settings)
        contents = _gather_contents(islands, members, router)
        draft = draft_manifest(contents, version)
        manifest = complete_version(
            version,
            contents,
            draft,
            passphrase,
            device=settings.device,
            on_progress=settings.on_draw,
        )
        return AssembledRelease(manifest, router)


def _trained_islands(islands: Islands, *, partial: bool) -> tuple[int, ...]:
    """Return the numbers of the islands whose experts are published.

    Raises:
        SetupError: islands are not trained, and the release is not `partial`; or none of them is.
    """
    num_islands = len(islands.split.islands)
    missing = missing_islands(islands)
    expected = "a trained expert"
    # Even a partial release needs one expert, so that --partial is not a remedy where none is trained.
    if len(missing) < num_islands:
        if partial or not missing:
            return tuple(number for number in range(num_islands) if number not in missing)
        expected = "a trained expert, or --partial"
    raise SetupError(
        f"{len(missing)} of {num_islands} islands",
        expected=expected,
        got=f"none for {_list_numbers(missing)}",
        remedy=(
            f"Train them: `ddm train {islands.path}`. One alone: `ddm train {islands.path} --island "
            f"{missing[0]}`. To publish those that are there, add --partial."
        ),
    )


def _sign_plan_of_seed(islands: Islands, passphrase: bytes) -> None:
    """Sign the plan of islands that start from a seed, once: it names the seed's digest.

    Raises:
        DigestError: a plan with another seed was signed before.
        PassphraseError: wrong passphrase.
    """
    plan = islands.plan
    # Nothing was signed yet in this folder, so that the lock's may be missing.
    islands.tuf.parent.mkdir(exist_ok=True)
    with islands.signing_lock():
        if not islands.tuf.is_dir():
            sign_first_plan(islands, plan, islands.split.name, passphrase)
            return
        signed_digest = sha256_file(islands.bundle / "plan.json")
    if signed_digest != plan.digest:
        raise DigestError(
            "the seed",
            expected=f"the one of the signed plan, sha256 {signed_digest[:16]}...",
            got=f"the seed of another plan, sha256 {plan.digest[:16]}...",
            remedy=(
                "Put back the folders seed and plan as they were when the first version was published. For another "
                "seed, split the data set again."
            ),
        )


def _list_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_NAMED_ISLANDS]))
    return f"{shown}, …" if len(numbers) > _MAX_NAMED_ISLANDS else shown


def _sign_islands(
    islands: Islands, present: Sequence[int], version: StagedVersion, passphrase: bytes
) -> tuple[ReleaseMember, ...]:
    """Put plan, experts and documents in place, and sign each island's part with a key of its own."""
    plan = islands.plan
    version.link_files(plan_sources(plan, islands.bundle))
    # A wrong passphrase ends here, before the router is trained.
    islands_key = load_key(islands, "islands", passphrase)
    class_counts_KCG = exact_counts(islands).get("class_counts")
    members = []
    for number in present:
        counts_CG = None
        if class_counts_KCG is not None:
            counts_CG = class_counts_KCG[number]
        members.append(_sign_island(islands, number, version, islands_key, counts_CG))
    return tuple(members)


def _sign_island(
    islands: Islands,
    number: int,
    version: StagedVersion,
    islands_key: SigningKey,
    counts_CG: Tensor | None,
) -> ReleaseMember:
    """Put an island's expert, class counts and document into the release; return its part, signed."""
    plan = islands.plan
    targets = version.targets(plan.plan_id)
    record = islands.trained(number)
    name = islands.split.islands[number].island_id
    link_or_copy(islands.island(number).expert, targets / expert_path(name, name))
    class_counts = None
    if counts_CG is not None:
        path = class_counts_path(name)
        save_tensors(targets / path, {"counts": counts_CG})
        class_counts = File.of(path, targets / path)

    expert = SubmittedExpert(
        expert_id=name,
        # Only where clusters divide the data is an island's number that of a coarse cluster of the plan.
        cluster=number if islands.split.by == "clusters" else None,
        num_images=record.num_images,
        steps=record.steps,
        file=record.expert,
        training=record.training,
        privacy=NoWeightPrivacy(),
    )
    # No submission: a ledger, a budget and an audit would have to be invented for it (docs/adr/0028).
    document = Island(
        root_digest=plan.root_digest,
        plan_id=plan.plan_id,
        plan_digest=plan.digest,
        silo_id=name,
        created_at=version.created_at,
        num_units=record.num_images,
        experts=(expert,),
        class_counts=class_counts,
        software=software_versions(),
    )
    write_atomic(targets / submission_path(name), document.encode())
    submission = File.of(submission_path(name), targets / submission_path(name))

    # An island has a key of its own, as TUF allows a key in one role only.
    key = island_key(islands_key, plan.plan_id, name)
    # Class counts are signed with the document, which names their digest.
    signed_files = {
        f"{plan.plan_id}/{file.path}": (file.bytes, file.digest)
        for file in (submission, expert.file)
    }
    role = sign_silo_metadata(
        plan.plan_id,
        name,
        signed_files,
        key,
        root_digest=plan.root_digest,
        version=version.number,
        now=version.created_at,
    )
    published = PublishedSilo(
        silo_id=name,
        submission=submission,
        key_fingerprint=key.public.fingerprint,
        audit="none",
        isolation="none",
        units=record.num_images,
    )
    return ReleaseMember(published, document, role)


def _train_router(
    islands: Islands,
    present: Sequence[int],
    members: Sequence[ReleaseMember],
    version: StagedVersion,
    settings: AssemblySettings,
) -> RouterReport:
    """Fit the router of the trained islands, and put its tensors in place."""
    plan = islands.plan
    targets = version.targets(plan.plan_id)
    training = RouterTraining(
        islands=islands,
        files=PlanFiles.load(plan, targets),
        present=tuple(present),
        seed=settings.seed,
        device=settings.device,
        on_progress=settings.on_router_step,
    )
    fit = fit_router(training)
    save_tensors(targets / ROUTER_NAME, fit.router.tensors())
    return _router_report(plan, members, training, fit, File.of(ROUTER_NAME, targets / ROUTER_NAME))


def _router_report(
    plan: Plan,
    members: Sequence[ReleaseMember],
    training: RouterTraining,
    fit: RouterFit,
    router: File,
) -> RouterReport:
    num_islands = len(members)
    return RouterReport(
        plan_id=plan.plan_id,
        submissions={member.silo_id: member.published.submission.digest for member in members},
        units={member.silo_id: member.published.units for member in members},
        router=router,
        candidate=plan.router.kind,
        published=fit.family,
        reason=fit.reason,
        judged_on="held_out_images",
        t_release=None,
        expert_priors=tuple(training.prior_K),
        # Every family answers likelihoods, which include no prior.
        training_prior=(1.0 / num_islands,) * num_islands,
        temperature=fit.calibration.temperature,
        minus_prior=fit.minus_prior,
        bands=fit.bands,
        sketches=None,
        calibration=fit.calibration.errors,
    )


def _gather_contents(
    islands: Islands, members: tuple[ReleaseMember, ...], router: RouterReport
) -> ReleaseContents:
    plan = islands.plan
    split = islands.split
    present_names = {member.silo_id for member in members}
    return ReleaseContents(
        name=split.name,
        cite=split.cite,
        plan=plan,
        plan_digest=plan.digest,
        members=members,
        missing_silos=tuple(name for name in plan.silos if name not in present_names),
        withdrawn_silos=(),
        router=router,
        division=_describe_division(split, plan),
    )


def _describe_division(split: Split, plan: Plan) -> DataDivision:
    sentence = _DIVISIONS[split.by].format(
        fine=plan.clustering.num_fine, num=len(split.islands), column=split.column or ""
    )
    values = {island.island_id: island.value or "" for island in split.islands}
    return DataDivision(sentence, split.column, values)
