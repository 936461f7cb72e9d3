"""The experts of each silo, and the public groups that each expert covers.

With one expert per (silo, cluster), the noised histogram alone determines which experts exist, so both sides derive the
same list, and the list reveals nothing more. A cluster with too few images is merged into the nearest with enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.partition.clustering import Clusters
from ddm.protocol.partition import Partition, RandomPartition, SiloClusterPartition

# Shape legend: N images, F fine centroids, G public groups, C coarse clusters, K silos, E experts, D feature values.


@dataclass(frozen=True)
class Part:
    """One expert's part of a silo.

    Attributes:
        expert_id: the silo's id, followed by the number of the cluster or of the random share.
        cluster: the coarse cluster, None where the partition has none.
        groups: the public groups that it covers, ascending; all groups where the partition has no clusters.
    """

    expert_id: str
    cluster: int | None
    groups: tuple[int, ...]


def silo_parts(
    partition: Partition, silo_id: str, clusters: Clusters, noisy_G: Tensor
) -> tuple[Part, ...]:
    """Return a silo's experts, in the order in which they are published.

    Args:
        partition: the plan's.
        silo_id: the silo.
        clusters: the plan's; its groups lie within coarse clusters.
        noisy_G: the silo's released histogram over groups.
    """
    by_cluster = isinstance(partition, SiloClusterPartition)
    kept = _kept(clusters, noisy_G, partition.min_images) if by_cluster else []
    return known_parts(partition, silo_id, clusters, kept)


def known_parts(
    partition: Partition, silo_id: str, clusters: Clusters, kept: Sequence[int]
) -> tuple[Part, ...]:
    """Return `silo_parts` of a silo whose clusters are known, as readers of a release know them, but not its histogram.

    Args:
        partition: the plan's.
        silo_id: the silo.
        clusters: the plan's.
        kept: the coarse clusters that have an expert, where the partition has clusters; the others join the nearest.
    """
    every = tuple(range(int(clusters.group_F.max()) + 1))
    if isinstance(partition, RandomPartition):
        return tuple(
            Part(f"{silo_id}-{number}", None, every) for number in range(partition.num_parts)
        )
    if not isinstance(partition, SiloClusterPartition):
        return (Part(silo_id, None, every),)
    owner_G = _owners(clusters, sorted(kept))
    found = sorted(set(owner_G.tolist()))
    return tuple(
        Part(f"{silo_id}-{c}", c, tuple(torch.nonzero(owner_G == c)[:, 0].tolist())) for c in found
    )


def part_of_images(
    partition: Partition, parts: Sequence[Part], group_N: Tensor, seed: int
) -> Tensor:
    """Return the number of the part that trains on each image, shape (N,), int64.

    Args:
        partition: the plan's.
        parts: the silo's, from `silo_parts`.
        group_N: each image's public group.
        seed: of a random partition, whose parts differ in size by at most one.
    """
    if isinstance(partition, RandomPartition):
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(group_N), generator=generator) % len(parts)
    part_G = torch.zeros(1 + max(max(part.groups) for part in parts), dtype=torch.int64)
    for number, part in enumerate(parts):
        part_G[list(part.groups)] = number
    return part_G[group_N]


@dataclass(frozen=True)
class Layout:
    """Every expert of a federation, in the manifest's order.

    Attributes:
        silo_E: the number of each expert's silo, ascending.
        parts: each expert's part.
        partition: the plan's.
    """

    silo_E: tuple[int, ...]
    parts: tuple[Part, ...]
    partition: Partition

    @classmethod
    def of(cls, partition: Partition, by_silo: Sequence[Sequence[Part]]) -> "Layout":
        """Concatenate the parts of all silos."""
        numbered = [(k, part) for k, parts in enumerate(by_silo) for part in parts]
        return cls(tuple(k for k, _ in numbered), tuple(part for _, part in numbered), partition)

    def split(self, mass_KG: Tensor) -> tuple[Tensor, Tensor]:
        """Split each silo's mixture among its experts.

        Args:
            mass_KG: each silo's shares of the groups; rows sum to 1, entries above 0.

        Returns:
            Each expert's shares of the groups (E, G), rows summing to 1, and its share of its silo (E,).
        """
        mass_EG, share_E = [], []
        size_K = torch.bincount(torch.tensor(self.silo_E)).tolist()
        for k, part in zip(self.silo_E, self.parts, strict=True):
            own_G = torch.zeros_like(mass_KG[k])
            own_G[list(part.groups)] = mass_KG[k, list(part.groups)]
            mass_EG.append(own_G / own_G.sum())
            whole = isinstance(self.partition, RandomPartition)
            share_E.append(torch.ones_like(own_G[0]) / size_K[k] if whole else own_G.sum())
        return torch.stack(mass_EG), torch.stack(share_E)


def _coarse(clusters: Clusters) -> Tensor:
    """Return the coarse cluster of each group, shape (G,)."""
    coarse_G = torch.zeros(int(clusters.group_F.max()) + 1, dtype=torch.int64)
    coarse_G[clusters.group_F] = clusters.coarse_F
    return coarse_G


def _kept(clusters: Clusters, noisy_G: Tensor, min_images: int) -> list[int]:
    """Return the coarse clusters with enough images, by the noised histogram, and the largest one in any case."""
    num_coarse = int(clusters.coarse_F.max()) + 1
    size_C = torch.zeros(num_coarse, dtype=noisy_G.dtype).index_add_(0, _coarse(clusters), noisy_G)
    kept_C = size_C >= min_images
    kept_C[size_C.argmax()] = True
    return [int(c) for c in torch.nonzero(kept_C)[:, 0]]


def _owners(clusters: Clusters, kept: Sequence[int]) -> Tensor:
    """Return the coarse cluster whose expert covers each group, shape (G,)."""
    num_coarse = int(clusters.coarse_F.max()) + 1
    centroids_FD = clusters.centroids_FD.double()
    num_C1 = torch.bincount(clusters.coarse_F, minlength=num_coarse)[:, None]
    centre_CD = torch.zeros(num_coarse, centroids_FD.shape[1], dtype=torch.float64)
    centre_CD = centre_CD.index_add_(0, clusters.coarse_F, centroids_FD) / num_C1
    # Computed from differences: a matrix product rounds differently on each machine, so that the distance of a
    # cluster from itself would not be 0.
    distance_CC = torch.cdist(centre_CD, centre_CD, compute_mode="donot_use_mm_for_euclid_dist")
    nearest_C = torch.tensor(kept)[distance_CC[:, kept].argmin(1)]
    return nearest_C[_coarse(clusters)]
