"""The router families at a total epsilon, from statistics that the silos' own code draws."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath
from ddm.errors import RefusedError
from ddm.io.tensors import load_tensors
from ddm.partition.layout import ExpertPart, Layout, silo_parts
from ddm.privacy.accounting import gaussian_delta, gaussian_mu_within
from ddm.protocol.base import sha256_hex
from ddm.protocol.partition import SiloPartition
from ddm.protocol.plan import Plan
from ddm.protocol.routers import LearnedSettings, SamplesSettings
from ddm.protocol.statistics import EXACT, StatisticKind
from ddm.routers.base import Router
from ddm.routers.calibration import Calibrated, calibrate
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import Labelled
from ddm.routers.learned import SiloSketches, fit_learned
from ddm.routers.public import Evidence, PublicData
from ddm.routers.samples import draw_from_experts, fit_samples
from ddm.statistics.base import StatisticSource
from ddm.statistics.cost import check_total, mechanisms
from ddm.statistics.of_plan import statistics_of
from ddm.statistics.sketch import sketch_noise_level
from examples.paper.plan import plan_for
from examples.paper.privacy.public import PublicParts
from examples.paper.privacy.worlds import PrivateWorld
from silo.privacy.ledger import Ledger, make_ledger
from silo.privacy.statistics import draw_statistic

DELTA = 1e-5
PATH = LinearPath()
CONCENTRATIONS = torch.logspace(-1, 4, 41, dtype=torch.float64)
MAX_BYTES = 1 << 28
# of the total epsilon; the Gaussian statistic gets the rest
COUNTS_SHARE = {
    "learned": 0.75,
}
IMAGES_PER_EXPERT = 600


@dataclass(frozen=True)
class RouterTerms:
    """The terms of one plan.

    Attributes:
        family: counts or learned.
        epsilon: of all statistics together at `DELTA`, replace-one, per image.
        num_steps: of training, for the families that train.
    """

    family: str
    epsilon: float
    num_steps: int = 1000


@dataclass(frozen=True)
class Fitted:
    """A family's router, and the counts of the same plan as evidence for its temperature."""

    router: Router
    evidence: Evidence


def as_published(fitted: Fitted, world: PrivateWorld, parts: PublicParts, seed: int) -> Calibrated:
    """Calibrate a router as an aggregator does: fit its temperature on held-out public images, weighed by counts.

    Where noise leaves those images without weight, an aggregator refuses to publish; the router counts as it is.
    """
    public = PublicData(
        images=world.held_out,
        group_N=parts.held_out_group_N,
        evidence=fitted.evidence,
        prior_E=world.prior_K.tolist(),
        path=PATH,
        seed=seed,
    )
    try:
        return calibrate(fitted.router, public).applied(fitted.router)
    except RefusedError:
        return Calibrated(fitted.router, 1.0, [1.0] * fitted.router.num_experts, PATH)


def fit_exact(world: PrivateWorld, parts: PublicParts) -> Fitted:
    """The counts router from true histograms: what the family reaches without noise.

    Shares are posterior means under a Dirichlet prior around the public ones, its weight by largest evidence.
    """
    weight_G = parts.sketch.group_weight_G.double()
    rows = []
    counted = []
    for group_N in parts.silo_groups:
        counts_G = torch.bincount(group_N, minlength=len(weight_G)).double()
        pseudo_AG = CONCENTRATIONS[:, None] * weight_G
        evidence_A = (torch.lgamma(pseudo_AG + counts_G) - torch.lgamma(pseudo_AG)).sum(1)
        evidence_A += torch.lgamma(CONCENTRATIONS) - torch.lgamma(CONCENTRATIONS + len(group_N))
        best_G = counts_G + pseudo_AG[evidence_A.argmax()]
        rows.append((best_G / best_G.sum()).log())
        counted.append(counts_G.long())
    experts_of_silos = [
        [ExpertPart(str(silo), None, tuple(range(len(weight_G))))] for silo in range(len(counted))
    ]
    layout = Layout.of(SiloPartition(min_images=1), experts_of_silos)
    evidence = Evidence(torch.stack(counted), world.num_units, EXACT, layout)
    return Fitted(CountsRouter(parts.sketch, torch.stack(rows), PATH), evidence)


def fit_family(world: PrivateWorld, parts: PublicParts, terms: RouterTerms, seed: int) -> Fitted:
    """Draw the statistics of one plan and fit its router."""
    plan = make_plan(world, terms)
    released = release(plan, world, parts)
    noisy_KG = torch.stack([tensors["counts"] for tensors in released["counts"]])
    epsilon = plan.statistics.counts.epsilon
    evidence = Evidence(noisy_KG, world.num_units, epsilon, _layout(plan, parts, noisy_KG))
    counts = CountsRouter.from_counts(parts.sketch, noisy_KG, world.num_units, epsilon, PATH)
    router: Router = counts
    if (
        isinstance(plan.router, LearnedSettings)
        and (level := sketch_noise_level(plan, parts.sketch)) is not None
    ):
        sketches = {f"silo{k}": tensors["sketch"] for k, tensors in enumerate(released["sketch"])}
        router = fit_learned(
            counts,
            SiloSketches(sketches, world.num_units, level),
            parts.lessons(world),
            plan.router,
            seed,
        )
    return Fitted(router, evidence)


def _layout(plan: Plan, parts: PublicParts, noisy_KG: Tensor) -> Layout:
    rows = zip(plan.silos, noisy_KG, strict=True)
    return Layout.of(
        plan.partition,
        [silo_parts(plan.partition, name, parts.clusters, row) for name, row in rows],
    )


def fit_from_samples(
    world: PrivateWorld, experts: Sequence[nn.Module], num_steps: int, seed: int
) -> Router:
    """The samples router, trained on images that the experts draw."""
    shape = tuple(world.test.shape[1:])
    patch = 4 if shape[-1] >= 16 else 2
    settings = SamplesSettings(
        patch=patch,
        hidden=64,
        depth=3,
        heads=4,
        num_steps=num_steps,
        images_per_expert=IMAGES_PER_EXPERT,
    )
    drawn_EN = draw_from_experts(experts, shape, IMAGES_PER_EXPERT, seed, PATH, None)
    return fit_samples(Labelled.drawn(drawn_EN), settings, PATH, seed)


@cache
def mu_within(epsilon: float, counts_epsilon: float) -> float:
    """Return the Gaussian statistic that fits beside counts of `counts_epsilon` into a total."""
    return gaussian_mu_within(epsilon, DELTA, counts_epsilon)


def make_plan(world: PrivateWorld, terms: RouterTerms) -> Plan:
    """Write the plan whose statistics cost `terms.epsilon` together."""
    data = world.dataset
    share = COUNTS_SHARE.get(terms.family, 1.0)
    statistics: dict[str, object] = {
        "unit": "image",
        "total": {"epsilon": terms.epsilon, "delta": DELTA},
        "counts": {"epsilon": share * terms.epsilon, "num_groups": data.num_groups},
    }
    if share < 1.0:
        mu = mu_within(terms.epsilon, share * terms.epsilon)
        gaussian = {"epsilon": terms.epsilon, "delta": gaussian_delta(mu, terms.epsilon)}
        statistics["sketch"] = gaussian | {"rank": data.released_rank}
    router: dict[str, object] = {"kind": terms.family}
    if terms.family == "learned":
        router |= {"hidden": 128, "depth": 3, "num_steps": terms.num_steps}
    plan = plan_for(
        world.test.shape[1:],
        statistics,
        silos=[f"silo{k}" for k in range(len(world.silos))],
        router=router,
        num_groups=data.num_groups,
        rank=data.rank,
    )
    check_total(plan)
    return plan


def release(
    plan: Plan, world: PrivateWorld, parts: PublicParts
) -> Mapping[StatisticKind, list[Mapping[str, Tensor]]]:
    """Draw every silo's statistics with the silos' own code: ledger, operating system's randomness, files."""
    kinds = tuple(mechanisms(plan))
    released: dict[StatisticKind, list[Mapping[str, Tensor]]] = {kind: [] for kind in kinds}
    for images, group_N in zip(world.silos, parts.silo_groups, strict=True):
        statistics = statistics_of(plan.statistics)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            make_ledger(folder / "ledger.jsonl")
            ledger = Ledger(folder / "ledger.jsonl", budget=plan.statistics.total, unit="image")
            source = StatisticSource(
                plan=plan,
                plan_digest=plan.digest,
                sketch=parts.sketch,
                images=images,
                group_N=group_N,
                unit_N=torch.arange(len(images)),
                label_N=None,
                dataset_digest=sha256_hex(b""),
            )
            for kind in kinds:
                path = draw_statistic(kind, source, ledger, folder)
                released[kind].append(
                    load_tensors(
                        path, statistics[kind].tensor_specs(len(images)), max_bytes=MAX_BYTES
                    )
                )
    return released
