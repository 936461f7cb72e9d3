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
class ExpertPart:
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
    partition: Partition,
    silo_id: str,
    clusters: Clusters,
    noisy_G: Tensor,
) -> tuple[ExpertPart, ...]:
    """Return a silo's experts, in the order in which they are published.

    Args:
        partition: the plan's.
        silo_id: the silo.
        clusters: the plan's; its groups are within coarse clusters.
        noisy_G: the silo's released histogram over groups.
    """
    clusters_with_expert: list[int] = []
    if isinstance(partition, SiloClusterPartition):
        clusters_with_expert = _clusters_with_expert(clusters, noisy_G, partition.min_images)
    return known_parts(partition, silo_id, clusters, clusters_with_expert)


def known_parts(
    partition: Partition,
    silo_id: str,
    clusters: Clusters,
    clusters_with_expert: Sequence[int],
) -> tuple[ExpertPart, ...]:
    """Return `silo_parts` of a silo whose clusters are known, as readers of a release know them, but not its histogram.

    Args:
        partition: the plan's.
        silo_id: the silo.
        clusters: the plan's.
        clusters_with_expert: the coarse clusters that have an expert, where the partition has clusters; the others join
            the nearest.
    """
    num_groups = int(clusters.group_F.max()) + 1
    all_groups = tuple(range(num_groups))
    if isinstance(partition, RandomPartition):
        return tuple(
            ExpertPart(f"{silo_id}-{number}", None, all_groups)
            for number in range(partition.num_parts)
        )
    if not isinstance(partition, SiloClusterPartition):
        return (ExpertPart(silo_id, None, all_groups),)
    owner_G = _owning_clusters(clusters, sorted(clusters_with_expert))
    parts = []
    for cluster in sorted(set(owner_G.tolist())):
        groups = torch.nonzero(owner_G == cluster)[:, 0].tolist()
        part = ExpertPart(f"{silo_id}-{cluster}", cluster, tuple(groups))
        parts.append(part)
    return tuple(parts)


def part_of_images(
    partition: Partition,
    parts: Sequence[ExpertPart],
    group_N: Tensor,
    seed: int,
) -> Tensor:
    """Return the number of the part that trains on each image, shape (N,), int64.

    Args:
        partition: the plan's.
        parts: the silo's, from `silo_parts`.
        group_N: each image's public group.
        seed: the seed of a random partition, whose parts differ in size by at most one.
    """
    if isinstance(partition, RandomPartition):
        generator = torch.Generator().manual_seed(seed)
        order_N = torch.randperm(len(group_N), generator=generator)
        return order_N % len(parts)
    num_groups = 1 + max(max(part.groups) for part in parts)
    part_G = torch.zeros(num_groups, dtype=torch.int64)
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
    parts: tuple[ExpertPart, ...]
    partition: Partition

    @classmethod
    def of(cls, partition: Partition, by_silo: Sequence[Sequence[ExpertPart]]) -> "Layout":
        """Concatenate the parts of all silos."""
        silo_E: list[int] = []
        all_parts: list[ExpertPart] = []
        for number, parts in enumerate(by_silo):
            silo_E += [number] * len(parts)
            all_parts += parts
        return cls(tuple(silo_E), tuple(all_parts), partition)

    def split(self, mass_KG: Tensor) -> tuple[Tensor, Tensor]:
        """Split each silo's mixture among its experts.

        Args:
            mass_KG: each silo's shares of the groups; rows sum to 1, entries above 0.

        Returns:
            Each expert's shares of the groups (E, G), rows summing to 1, and its share of its silo (E,).
        """
        mass_EG = []
        share_E = []
        num_experts_K = torch.bincount(torch.tensor(self.silo_E)).tolist()
        for silo, part in zip(self.silo_E, self.parts, strict=True):
            mass_G = mass_KG[silo]
            groups = list(part.groups)
            part_G = torch.zeros_like(mass_G)
            part_G[groups] = mass_G[groups]
            total = part_G.sum()
            mass_EG.append(part_G / total)
            share = total
            if isinstance(self.partition, RandomPartition):
                # Random parts cover all groups and have equal sizes.
                share = torch.ones_like(total) / num_experts_K[silo]
            share_E.append(share)
        return torch.stack(mass_EG), torch.stack(share_E)


def _coarse_of_groups(clusters: Clusters) -> Tensor:
    """Return the coarse cluster of each group, shape (G,)."""
    num_groups = int(clusters.group_F.max()) + 1
    coarse_G = torch.zeros(num_groups, dtype=torch.int64)
    coarse_G[clusters.group_F] = clusters.coarse_F
    return coarse_G


def _clusters_with_expert(clusters: Clusters, noisy_G: Tensor, min_images: int) -> list[int]:
    """Return the coarse clusters with enough images, by the noised histogram, and the largest one in any case."""
    num_coarse = int(clusters.coarse_F.max()) + 1
    size_C = torch.zeros(num_coarse, dtype=noisy_G.dtype)
    size_C.index_add_(0, _coarse_of_groups(clusters), noisy_G)
    has_expert_C = size_C >= min_images
    # A silo has one expert at least, however few images it has.
    has_expert_C[size_C.argmax()] = True
    clusters_with_expert: list[int] = torch.nonzero(has_expert_C)[:, 0].tolist()
    return clusters_with_expert


def _owning_clusters(clusters: Clusters, clusters_with_expert: Sequence[int]) -> Tensor:
    """Return the coarse cluster whose expert covers each group, shape (G,)."""
    num_coarse = int(clusters.coarse_F.max()) + 1
    centroids_FD = clusters.centroids_FD.double()
    num_centroids_C = torch.bincount(clusters.coarse_F, minlength=num_coarse)
    dim = centroids_FD.shape[1]
    sum_CD = torch.zeros(num_coarse, dim, dtype=torch.float64)
    sum_CD.index_add_(0, clusters.coarse_F, centroids_FD)
    centre_CD = sum_CD / num_centroids_C[:, None]
    # Computed from differences: a matrix product rounds differently on each machine, so that the distance of a
    # cluster from itself would not be 0.
    distance_CC = torch.cdist(centre_CD, centre_CD, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance_CC[:, clusters_with_expert].argmin(1)
    nearest_C = torch.tensor(clusters_with_expert)[nearest]
    return nearest_C[_coarse_of_groups(clusters)]
