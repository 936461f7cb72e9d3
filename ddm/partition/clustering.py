"""Public clusters of features on three levels: fine k-means centroids, groups of them, coarse clusters of groups."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog
from torch import Tensor

from ddm.errors import DataError, NumericalError, PolicyError, SetupError, ShapeError
from ddm.io.tensors import TensorSpec
from ddm.partition.nearest import NearestCentroid

# Shape legend: N features, F fine centroids, G groups, C coarse clusters, D values of one feature.

_BALANCING_ROUNDS = 10


@dataclass(frozen=True)
class Clusters:
    """Public clusters: every fine centroid belongs to one group, and every group to one coarse cluster.

    Attributes:
        centroids_FD: fine centroids in feature space, float32.
        coarse_F: the coarse cluster of each fine centroid, int64.
        group_F: the group of each fine centroid in the counts, int64.
    """

    centroids_FD: Tensor
    coarse_F: Tensor
    group_F: Tensor

    def assign(self, features: Tensor) -> Tensor:
        """Return the index of the nearest fine centroid, shape (N,), int64; ties go to the lowest index.

        The answer is that of float64 distances, on any machine; see `ddm.partition.nearest`. Features that are not
        finite belong to centroid 0.

        Args:
            features: shape (N, D), as the plan's encoder makes them.

        Raises:
            ShapeError: features of another dimension.
        """
        dim = self.centroids_FD.shape[1]
        if features.ndim != 2 or features.shape[1] != dim:
            got = str(tuple(features.shape))
            raise ShapeError("features", expected=f"(N, {dim})", got=got)
        return NearestCentroid(self.centroids_FD).find(features)

    def groups(self, features: Tensor) -> Tensor:
        """Return the group of each feature in the counts, shape (N,), int64."""
        return self.group_F[self.assign(features)]

    def check(self, num_coarse: int, num_groups: int) -> None:
        """Refuse received clusters whose indices do not fit the plan.

        Raises:
            PolicyError: a centroid is not finite, an index is out of range or unused, or a group belongs to two coarse
                clusters, so that its expert would be ambiguous.
        """
        if not torch.isfinite(self.centroids_FD).all():
            raise PolicyError(
                "the plan's centroids",
                expected="finite numbers",
                got="NaN or infinity",
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )
        _check_indices("coarse cluster", self.coarse_F, num_coarse)
        _check_indices("group", self.group_F, num_groups)
        group_and_coarse_F2 = torch.stack([self.group_F, self.coarse_F], 1)
        pairs = torch.unique(group_and_coarse_F2, dim=0)
        if len(pairs) > num_groups:
            raise PolicyError(
                "the plan's groups",
                expected="each in one coarse cluster",
                got=f"{num_groups} groups with {len(pairs)} coarse clusters between them",
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of these clusters."""
        return {
            "centroids": self.centroids_FD,
            "coarse": self.coarse_F,
            "group": self.group_F,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Clusters":
        """Rebuild the clusters from tensors loaded against `cluster_specs`."""
        return cls(
            centroids_FD=tensors["centroids"],
            coarse_F=tensors["coarse"],
            group_F=tensors["group"],
        )


def _check_indices(name: str, index_F: Tensor, num: int) -> None:
    """Refuse indices out of range, and an index that no fine centroid has."""
    lowest = int(index_F.min())
    highest = int(index_F.max())
    if lowest < 0 or highest >= num:
        raise PolicyError(
            f"the plan's {name} indices",
            expected=f"0 to {num - 1}",
            got=f"{lowest} to {highest}",
            remedy=(
                "Ask the aggregator for another plan: this one contradicts itself, and "
                "policy.toml cannot change that."
            ),
        )
    num_used = len(torch.unique(index_F))
    if num_used != num:
        raise PolicyError(
            f"the plan's {name}s",
            expected=f"{num}, each with a fine centroid",
            got=f"only {num_used} with one",
            remedy=(
                "Ask the aggregator for another plan: this one contradicts itself, and "
                "policy.toml cannot change that."
            ),
        )


def cluster_specs(num_fine: int, dim: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of stored clusters of `dim` features."""
    centroids = TensorSpec("F32", (num_fine, dim))
    index = TensorSpec("I64", (num_fine,))
    return {"centroids": centroids, "coarse": index, "group": index}


def fit_clustering(
    features: Tensor,
    num_fine: int,
    num_coarse: int,
    num_groups: int,
    seed: int,
    *,
    balanced: bool = False,
) -> Clusters:
    """Cluster public features by k-means, then the centroids into groups, then the groups into coarse clusters.

    Centroids and groups are weighted by their numbers of images.

    Args:
        features: public features, shape (N, D).
        num_fine: number of fine centroids.
        num_coarse: number of coarse clusters, at most `num_groups`.
        num_groups: number of groups in the counts, at most `num_fine`.
        seed: the seed of the initial centroids; the features are public, so privacy does not depend on it.
        balanced: give the coarse clusters about equal numbers of public images (`_balance`).

    Raises:
        DataError: fewer distinct public images than fine centroids.
        SetupError: more coarse clusters than groups, or more groups than fine centroids.
        NumericalError: features that are not finite.
    """
    if not num_coarse <= num_groups <= num_fine:
        raise SetupError(
            "clustering",
            expected="no more coarse clusters than groups, and no more groups than fine centroids",
            got=f"{num_coarse} coarse clusters, {num_groups} groups, {num_fine} fine centroids",
            remedy="Correct the three numbers in the table [clustering] of the recipe.",
        )
    if not bool(torch.isfinite(features).all()):
        raise NumericalError(
            "features of public images",
            expected="finite numbers",
            got="NaN or infinity",
            remedy="Leave out public images that hold NaN or infinity, or choose another encoder.",
        )
    num_distinct = len(torch.unique(features, dim=0))
    if num_distinct < num_fine:
        raise DataError(
            "public images",
            expected=f"at least {num_fine}, one per fine centroid",
            got=f"{num_distinct} distinct",
            remedy="Give more public images that differ, or lower clustering.num_fine in the recipe.",
        )
    x_ND = features.double().numpy()
    weight_N = np.ones(len(x_ND))
    fine_N, centroids_FD = _k_means(x_ND, weight_N, num_fine, seed)
    # Each level clusters the centroids of the level before, by the number of images that they stand for.
    weight_F = np.bincount(fine_N, minlength=num_fine).astype(np.float64)
    group_F, centre_GD = _k_means(centroids_FD, weight_F, num_groups, seed + 1)
    weight_G = np.bincount(group_F, weight_F, minlength=num_groups).astype(np.float64)
    coarse_G, centre_CD = _k_means(centre_GD, weight_G, num_coarse, seed + 2)
    if balanced:
        coarse_G = _balance(centre_GD, weight_G, centre_CD)
        num_used = len(np.unique(coarse_G))
        if num_used < num_coarse:
            raise DataError(
                "balanced clusters",
                expected=f"{num_coarse} that are not empty",
                got=str(num_used),
                remedy="Plan more groups or fewer coarse clusters: a group is never split.",
            )
    return Clusters(
        centroids_FD=torch.from_numpy(centroids_FD).float(),
        coarse_F=torch.from_numpy(coarse_G[group_F]),
        group_F=torch.from_numpy(group_F),
    )


def _balance(
    x_GD: NDArray[np.float64],
    weight_G: NDArray[np.float64],
    centre_CD: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Assign rows to clusters of about equal weight, with the least total squared distance.

    A few rounds of Lloyd's algorithm whose assignment is a transport problem with equal capacities. Its solution splits
    fewer rows than there are clusters; a split row goes to its largest part, so that a cluster differs from its equal
    share by less than the weight of the split rows.
    """
    num_rows = len(x_GD)
    num_clusters = len(centre_CD)
    # The shares of each row add up to 1, and the weights in each cluster to the same.
    sum_of_row = sparse.kron(sparse.eye(num_rows), np.ones((1, num_clusters)))
    weight_of_cluster = sparse.kron(weight_G[None], sparse.eye(num_clusters))
    constraints = sparse.vstack([sum_of_row, weight_of_cluster])
    equal_C = np.full(num_clusters, weight_G.sum() / num_clusters)
    required_sums = np.r_[np.ones(num_rows), equal_C]
    weight_G1 = weight_G[:, None]
    coarse_G = np.zeros(num_rows, dtype=np.int64)
    for _ in range(_BALANCING_ROUNDS):
        difference_GCD = x_GD[:, None] - centre_CD
        distance_GC = (difference_GCD**2).sum(2)
        cost_GC = weight_G1 * distance_GC
        solution = linprog(cost_GC.ravel(), A_eq=constraints, b_eq=required_sums)
        if not solution.success:
            raise NumericalError(
                "balancing",
                expected="a solution of the linear program",
                got=str(solution.message)[:120],
                remedy="Set clustering.balanced = false in the recipe, or plan more groups.",
            )
        coarse_before_G = coarse_G
        share_GC = solution.x.reshape(num_rows, num_clusters)
        coarse_G = share_GC.argmax(1).astype(np.int64)
        if np.array_equal(coarse_before_G, coarse_G):
            break
        membership_GC = np.eye(num_clusters)[coarse_G]
        weight_GC = membership_GC * weight_G1
        # A cluster may be empty.
        weight_C = np.maximum(weight_GC.sum(0), 1e-12)
        centre_CD = (weight_GC.T @ x_GD) / weight_C[:, None]
    return coarse_G


def _k_means(
    x: NDArray[np.float64],
    weight: NDArray[np.float64],
    num: int,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each row's cluster and the centroids."""
    if num == len(x):
        return np.arange(num), x
    # Only fitting needs scikit-learn, whose import takes more than a second; opening a plan does not.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            model = KMeans(num, n_init=4, random_state=seed % 2**32)
            model.fit(x, sample_weight=weight)
        except ConvergenceWarning as error:
            raise DataError(
                "public images",
                expected=f"{num} distinct clusters",
                got=f"fewer in {len(x)} rows",
                remedy="Give more public images that differ, or lower clustering.num_fine in the recipe.",
            ) from error
    labels = model.labels_.astype(np.int64)
    centroids = np.asarray(model.cluster_centers_, dtype=np.float64)
    return labels, centroids
