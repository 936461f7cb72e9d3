"""A small world in which everything is known: public groups are Gaussian, silos mix them in known shares."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath
from ddm.partition.layout import ExpertPart, Layout
from ddm.protocol.partition import RandomPartition, SiloClusterPartition, SiloPartition
from ddm.routers.base import Router
from ddm.routers.sketch import Sketch

PATH = LinearPath()
GROUPS = 4
RANK = 3
SIDE = 4


@dataclass(frozen=True)
class RouterProblem:
    """Public images with their groups, and silos' images with theirs."""

    public: Tensor
    public_group: Tensor
    silos: list[Tensor]
    silo_group: list[Tensor]

    @property
    def num_units(self) -> list[int]:
        """How many images each silo has."""
        return [len(silo) for silo in self.silos]

    def histogram(self) -> Tensor:
        """How many of them lie in each group."""
        return torch.stack([torch.bincount(group, minlength=GROUPS) for group in self.silo_group])

    def sketch(self) -> Sketch:
        """Fit the public sketch."""
        return Sketch.fit(self.public, self.public_group, RANK, GROUPS)

    def released(self, sketch: Sketch, t_r: float, seed: int = 0) -> dict[str, Tensor]:
        """Sketches noised to `t_r`; a test may seed what a silo must not."""
        generator = torch.Generator().manual_seed(seed)
        released = {}
        for k, silo in enumerate(self.silos):
            n = torch.randn(len(silo), RANK, generator=generator, dtype=torch.float64)
            released[f"silo{k}"] = (
                (1 - t_r) * sketch.project(silo) + t_r / sketch.scale * n
            ).float()
        return released


class OverconfidentRouter:
    """A router that is surer than it may be, the more so the less noise there is: one temperature mends it."""

    def __init__(self, router: Router, factor: float) -> None:
        self.router = router
        self.factor = factor
        self.num_experts = router.num_experts

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return the router's answer, `factor` times as sure at t = 0 and as sure at t = 1."""
        factor_B = 1 + (self.factor - 1) * (1 - t_B).square()
        return factor_B[:, None] * self.router.log_likelihood(x_B, t_B)


def make_problem(
    shares: list[list[float]], sizes: list[int], shift: float = 0.0, seed: int = 0
) -> RouterProblem:
    """Draw a problem.

    Args:
        shares: of each silo, the share of its images in each group.
        sizes: of each silo, its number of images.
        shift: moves the last silo's images within their groups, which no histogram shows.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    centre = 1.5 * rng.standard_normal((GROUPS, SIDE * SIDE))
    scale = np.linspace(1.0, 0.2, SIDE * SIDE)

    def draw(group: np.ndarray, moved: float = 0.0) -> Tensor:
        x = centre[group] + scale * rng.standard_normal((len(group), SIDE * SIDE)) + moved * scale
        return torch.from_numpy(x).float().view(-1, 1, SIDE, SIDE)

    public_group = np.arange(800) % GROUPS
    groups = [rng.choice(GROUPS, size, p=share) for size, share in zip(sizes, shares, strict=True)]
    shift_K = [0.0] * (len(groups) - 1) + [shift]
    silos = [draw(group, moved) for group, moved in zip(groups, shift_K, strict=True)]
    return RouterProblem(
        public=draw(public_group),
        public_group=torch.from_numpy(public_group),
        silos=silos,
        silo_group=[torch.from_numpy(group) for group in groups],
    )


def one_expert_per_silo(num_silos: int) -> Layout:
    """One expert a silo."""
    parts = [[ExpertPart(f"silo{k}", None, tuple(range(GROUPS)))] for k in range(num_silos)]
    return Layout.of(SiloPartition(min_images=1), parts)


def clustered_layout(num_silos: int = 2) -> Layout:
    """Two experts a silo, one for the first half of the groups."""
    halves = (tuple(range(GROUPS // 2)), tuple(range(GROUPS // 2, GROUPS)))
    parts = [
        [ExpertPart(f"silo{k}-{c}", c, groups) for c, groups in enumerate(halves)]
        for k in range(num_silos)
    ]
    return Layout.of(SiloClusterPartition(min_images=1), parts)


def random_layout(num_silos: int = 2) -> Layout:
    """Two experts a silo, its images dealt at random."""
    parts = [
        [ExpertPart(f"silo{k}-{c}", None, tuple(range(GROUPS))) for c in range(2)]
        for k in range(num_silos)
    ]
    return Layout.of(RandomPartition(min_images=1, num_parts=2), parts)
