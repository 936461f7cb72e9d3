"""The worker's stages from an accepted plan to a draft: scan, assign, draw statistics.

Training itself: `silo.worker.training`; the audit: `silo.worker.auditing`.
"""

import io
from collections.abc import Iterable
from math import nan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.errors import DataError, PolicyError
from ddm.images.rows import Images, SelectedImages
from ddm.io.files import write_atomic
from ddm.loading.plan import PlanFiles
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.protocol.base import sha256_hex
from ddm.protocol.latent import Autoencoder
from ddm.protocol.statistics import StatisticKind
from ddm.statistics.base import StatisticSource
from ddm.statistics.cost import paid_mechanisms
from ddm.system.progress import ProgressCallback
from silo.config import Policy, Site
from silo.data.cohort import Cohort, CohortRequest, load_cohort
from silo.data.declared import check_declared
from silo.images.source import ImageSource
from silo.plan.acceptance import AcceptedPlan
from silo.plan.workspace import Workspace
from silo.privacy import holder
from silo.privacy.expert import PaidTraining, pay_for_training
from silo.privacy.holder import note_site
from silo.privacy.ledger import Ledger
from silo.privacy.spending import PlannedSpending
from silo.privacy.statistics import draw_statistic
from silo.worker.training import num_classes

_RESTORE_REMEDY = "Restore private/ from backup, or give the plan up: `silo withdraw SITE`."
# Images whose features are in memory at once; every encoder's own block divides it.
_BLOCK_IMAGES = 1 << 14


def open_ledger(site: Site, policy: Policy) -> Ledger:
    """Open the data holder's one ledger, and let this site's policy bind all sites that name it."""
    note_site(site, policy)
    return holder.open_ledger(site, policy)


def scan_images(
    site: Site,
    accepted: AcceptedPlan,
    policy: Policy,
    advance: ProgressCallback = lambda done, num: None,
) -> Cohort:
    """Read the private images, with patients, classes and captions where the plan needs them, and check them.

    Args:
        site: the silo's folder.
        accepted: the plan.
        policy: the site's.
        advance: see `silo.data.transformed.open_transformed`; an exception it raises stops the work.

    Raises:
        DataError: the data are not what policy.toml declares; see `silo.data.cohort.load_cohort`.
    """
    plan = accepted.plan
    source = ImageSource.of_site(site)
    check_declared(source, policy)
    data_spec = plan.data
    if policy.data.kind == "arrays" and policy.data.range and not plan.transform:
        # Floating point is compared with the declared range, within which the plan's is: a plan learns nothing of the
        # data themselves.
        data_spec = data_spec.model_copy(update={"range": policy.data.range})
    class_names: tuple[str, ...] = ()
    if isinstance(plan.condition, ClassCondition):
        class_names = plan.condition.names
    latent_shape = None
    if isinstance(plan.latent, Autoencoder):
        latent_shape = plan.expert_shape
    request = CohortRequest(
        data=data_spec,
        min_images=policy.min_images,
        unit=plan.statistics.unit,
        num_classes=num_classes(plan),
        class_names=class_names,
        known_classes=policy.data.known_classes,
        captions=isinstance(plan.condition, TextCondition),
        latent_shape=latent_shape,
        transform=plan.transform,
    )
    return load_cohort(source, request, site.salt(), site.private, advance)


def check_agreed_numbers(accepted: AcceptedPlan, cohort: Cohort, silo_id: str) -> None:
    """Refuse, before training, data of more units than the card states: intake would quarantine the submission.

    Raises:
        PolicyError: the data have grown since this site was enrolled.
    """
    plan = accepted.plan
    agreed = plan.agreed[silo_id]
    unit = plan.statistics.unit
    # Where the unit is an image, the second entry replaces the first, with the same numbers.
    numbers = {
        "image": (cohort.num_pictures, agreed.images),
        unit: (cohort.num_units, agreed.units(unit)),
    }
    for name, (num_here, num_agreed) in numbers.items():
        if num_here > num_agreed:
            raise PolicyError(
                f"plan {plan.plan_id}: {name}s of this site",
                expected=f"at most {num_agreed}, as its card and the plan state",
                got=f"{num_here}",
                remedy=(
                    f"Agree on a higher number with `silo enroll SITE --out card.json --{name}s N`, give the "
                    "aggregator the card and ask for a new plan; or leave some out, and give this plan up: "
                    "`silo withdraw SITE`."
                ),
            )


def check_budget(accepted: AcceptedPlan, cohort: Cohort, ledger: Ledger) -> None:
    """Refuse, before training and again before the first draw, a plan whose statistics exceed the budget.

    Raises:
        BudgetError: nothing was debited and no noise was drawn.
    """
    mechanisms = paid_mechanisms(accepted.plan, cohort.num_units)
    ledger.check_affordable(accepted.digest, cohort.digest, mechanisms)


def debit_training(
    site: Site, policy: Policy, accepted: AcceptedPlan, cohort: Cohort
) -> PaidTraining | None:
    """Debit the plan before its expert is trained privately; None where it is not.

    Raises:
        BudgetError: nothing was debited.
    """
    if accepted.plan.expert.privacy is None:
        return None
    ledger = open_ledger(site, policy)
    spending = PlannedSpending(
        accepted.plan,
        accepted.digest,
        cohort.digest,
        cohort.num_units,
    )
    return pay_for_training(spending, ledger)


def assign_images(
    cohort: Cohort,
    files: PlanFiles,
    cohort_path: Path,
    on_progress: ProgressCallback,
    *,
    pixels: Images | None = None,
) -> None:
    """Assign every image to its nearest public centroid, block by block, and write the cohort's table.

    Args:
        cohort: the private images.
        files: the plan's.
        cohort_path: where the table goes.
        on_progress: called with images encoded and images in all; an exception it raises stops the work, and nothing
            is written.
        pixels: what features are made of, where the cohort holds latents.
    """
    images = cohort.images if pixels is None else pixels
    # The place of an image in a block changes its rounding, and a network that came with the plan may amplify that. A
    # unit with one image less would then move others to other groups, which the epsilon of the counts does not cover.
    encoder = files.encoder.for_single_samples()
    num_images = len(images)
    fine_N = torch.empty(num_images, dtype=torch.int64)
    for start in range(0, num_images, _BLOCK_IMAGES):
        rows_B = torch.arange(start, min(start + _BLOCK_IMAGES, num_images))

        def report(num_encoded: int, _: int, start: int = start) -> None:
            on_progress(start + num_encoded, num_images)

        # A network that came with the plan may overflow for an image. To stop there would answer a question about that
        # image, which no ledger debits; so its features become NaN, and it is assigned like any other.
        features_BD = encoder.encode(SelectedImages(images, rows_B), report, replacement=nan)
        fine_N[rows_B] = files.clusters.assign(features_BD)
        report(len(rows_B), num_images)
    _write_assignment(cohort, files, fine_N, cohort_path)


def _write_assignment(cohort: Cohort, files: PlanFiles, fine_N: Tensor, cohort_path: Path) -> None:
    import pandas as pd  # takes a second, which most starts need not wait

    coarse_N = files.clusters.coarse_F[fine_N]
    group_N = files.clusters.group_F[fine_N]

    frame = pd.DataFrame(
        {
            "index": np.arange(len(cohort.images)),
            "fine": fine_N.numpy(),
            "coarse": coarse_N.numpy(),
            "group": group_N.numpy(),
        }
    )
    # Read back and compared: the file name is the same for every plan of this site.
    frame.attrs["dataset_digest"] = cohort.digest
    frame.attrs["centroids"] = _fingerprint(files)
    table = io.BytesIO()
    frame.to_parquet(table, index=False)
    write_atomic(cohort_path, table.getvalue())


def read_assignment(cohort: Cohort, files: PlanFiles, cohort_path: Path) -> Tensor:
    """Read each image's fine centroid back from the cohort's table, shape (N,), int64.

    Raises:
        DataError: no table, or one of other images or of another plan's centroids.
    """
    import pandas as pd

    expected = f"the assignment of {len(cohort.images)} images to this plan's centroids"
    sources = {"dataset_digest": cohort.digest, "centroids": _fingerprint(files)}
    try:
        frame = pd.read_parquet(cohort_path)
        differing = [name for name, digest in sources.items() if frame.attrs.get(name) != digest]
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise DataError(
            "cohort.parquet", expected=expected, got="no readable table", remedy=_RESTORE_REMEDY
        ) from error
    if differing or len(frame) != len(cohort.images):
        got = f"a table of {len(frame)} images"
        for name in differing:
            got += f", another {name}"
        raise DataError("cohort.parquet", expected=expected, got=got, remedy=_RESTORE_REMEDY)
    # torch wants writable memory, and pandas may give a view that is not.
    return torch.from_numpy(frame["fine"].to_numpy().copy())


def _fingerprint(files: PlanFiles) -> str:
    """Return the digest of the centroids that images are assigned to."""
    return sha256_hex(files.clusters.centroids_FD.numpy().tobytes())


def draw_statistics(
    accepted: AcceptedPlan,
    cohort: Cohort,
    files: PlanFiles,
    fine_N: Tensor,
    work: Workspace,
    ledger: Ledger,
    kinds: Iterable[StatisticKind],
) -> None:
    """Draw some of this plan's statistics; all of them are debited in the ledger before any noise is drawn.

    Raises:
        BudgetError: the ledger would go over; nothing was drawn.
        LedgerError: the ledger is damaged.
    """
    work.statistics.mkdir(exist_ok=True)
    # For all statistics, whichever are drawn now: a plan that is paid in part could never be sent.
    check_budget(accepted, cohort, ledger)
    source = StatisticSource(
        plan=accepted.plan,
        plan_digest=accepted.digest,
        sketch=files.sketch,
        images=cohort.images,
        group_N=files.clusters.group_F[fine_N],
        unit_N=cohort.unit_N,
        label_N=cohort.label_N,
        dataset_digest=cohort.digest,
    )
    for kind in kinds:
        draw_statistic(kind, source, ledger, work.statistics)
