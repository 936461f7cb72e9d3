"""To which public cell does a feature belong? Fine k-means centroids, in groups, in coarse clusters."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog
from torch import Tensor

from ddm.errors import DataError, NumericalError, PolicyError, SetupError, ShapeError
from ddm.tensors import TensorSpec

# Shape legend: N features, B of one block, F fine centroids, G groups, C coarse clusters, D values of one feature,
# E = D + 1, R rows and W columns of a table that holds F scores.

_BLOCK = 512  # rows whose scores stay in a core's cache between the product and the search for the least
_WIDTH = 32  # columns of the table that a row of scores is folded into
_BALANCING_ROUNDS = 10


@dataclass(frozen=True)
class Clusters:
    """Public clusters on three levels: every fine centroid lies in a group, every group in one coarse cluster.

    Attributes:
        centroids_FD: fine centroids in feature space, float32.
        coarse_F: the coarse cluster of each fine centroid, int64.
        group_F: the group of each fine centroid in the counts release, int64.
    """

    centroids_FD: Tensor
    coarse_F: Tensor
    group_F: Tensor

    def assign(self, features: Tensor) -> Tensor:
        """Return the index of the nearest fine centroid, shape (N,), int64; ties go to the lowest index.

        The answer is that of float64 distances between the float32 values, whatever the number of threads: where
        rounding could decide, the candidates' distances are computed again, in float64.

        Args:
            features: shape (N, D), as the plan's encoder makes them.

        Raises:
            ShapeError: features of another dimension.
        """
        if features.ndim != 2 or features.shape[1] != self.centroids_FD.shape[1]:
            expected = f"(N, {self.centroids_FD.shape[1]})"
            raise ShapeError("features", expected=expected, got=str(tuple(features.shape)))
        centre_D = self.centroids_FD.mean(0)
        centred_FD = self.centroids_FD - centre_D  # far from the origin, the terms of a score would cancel
        longest = float(centred_FD.norm(dim=1).max())
        score_FE = torch.cat([-centred_FD, centred_FD.square().sum(1, keepdim=True) / 2], 1)
        score_FE = F.pad(score_FE, (0, 0, 0, -len(score_FE) % _WIDTH))  # whole rows of the table
        score_FE[len(centred_FD) :, -1] = torch.finfo(torch.float32).max  # never the least
        nearest_N = torch.empty(len(features), dtype=torch.int64)
        for start in range(0, len(features), _BLOCK):
            x_BD = features[start : start + _BLOCK].float()
            nearest_N[start : start + _BLOCK], unsure = _nearest(x_BD - centre_D, score_FE, longest)
            for row, candidates in unsure:
                apart = x_BD[row].double() - self.centroids_FD[candidates].double()
                nearest_N[start + row] = candidates[apart.square().sum(1).argmin()]
        return nearest_N

    def groups(self, features: Tensor) -> Tensor:
        """Return the group of each feature in the counts release, shape (N,), int64."""
        return self.group_F[self.assign(features)]

    def check(self, num_coarse: int, num_groups: int) -> None:
        """Refuse received clusters whose indices do not fit the plan.

        Raises:
            PolicyError: a centroid is not finite, or names a coarse cluster or group that the plan does not have, or a
                group lies in two coarse clusters, so that it would not say which expert answers for it.
        """
        if not torch.isfinite(self.centroids_FD).all():
            raise PolicyError("the plan's centroids", expected="finite numbers", got="others")
        for name, index_F, most in (("coarse cluster", self.coarse_F, num_coarse), ("group", self.group_F, num_groups)):
            if int(index_F.min()) < 0 or int(index_F.max()) >= most:
                raise PolicyError(f"the plan's {name} indices", expected=f"0 to {most - 1}", got="others")
        pairs = torch.unique(torch.stack([self.group_F, self.coarse_F], 1), dim=0)
        if len(pairs) > len(torch.unique(self.group_F)):
            raise PolicyError("the plan's groups", expected="each in one coarse cluster", got="one in two")

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of these clusters."""
        return {"centroids": self.centroids_FD, "coarse": self.coarse_F, "group": self.group_F}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Clusters":
        """Rebuild the clusters from tensors loaded against `cluster_specs`."""
        return cls(centroids_FD=tensors["centroids"], coarse_F=tensors["coarse"], group_F=tensors["group"])


def _nearest(x_BD: Tensor, score_FE: Tensor, longest: float) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Find the least score ``|c|^2 / 2 - x.c`` in every row, where `score_FE` holds -c and, last, ``|c|^2 / 2``.

    To find a least value is a vector operation, to find where it is would take a third of the product's time. So a row
    of scores is folded into a table: the least lies where the table row and the column with the least values cross.

    Returns:
        The likely nearest, and the rows where rounding could decide, each with its candidates.
    """
    score_BF = F.pad(x_BD, (0, 1), value=1.0) @ score_FE.T
    table_BRW = score_BF.view(len(x_BD), -1, _WIDTH)
    column_BW, row_BR = table_BRW.amin(1), table_BRW.amin(2)
    index_B = row_BR.argmin(1) * _WIDTH + column_BW.argmin(1)
    # Of a sum of D products in any order rounding takes at most D eps / 2 times |x| |c|; of two scores, twice that.
    slack_B = (x_BD.shape[1] + 8) * torch.finfo(torch.float32).eps * longest * (x_BD.norm(dim=1) + longest)
    most_B = column_BW.amin(1) + slack_B
    close_B = ((column_BW <= most_B[:, None]).sum(1) > 1) | ((row_BR <= most_B[:, None]).sum(1) > 1)
    unsure = close_B.nonzero()[:, 0].tolist()
    return index_B, [(row, (score_BF[row] <= most_B[row]).nonzero()[:, 0]) for row in unsure]


def cluster_specs(num_fine: int, dim: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of stored clusters of `dim` features."""
    index = TensorSpec("I64", (num_fine,))
    return {"centroids": TensorSpec("F32", (num_fine, dim)), "coarse": index, "group": index}


def fit_clustering(
    features: Tensor, num_fine: int, num_coarse: int, num_groups: int, seed: int, *, balanced: bool = False
) -> Clusters:
    """Cluster public features by k-means, then the centroids into groups, then the groups into coarse clusters.

    Centroids and groups weigh as many images as they hold.

    Args:
        features: public features, shape (N, D).
        num_fine: number of fine centroids.
        num_coarse: number of coarse clusters, at most `num_groups`.
        num_groups: number of groups in the counts release, at most `num_fine`.
        seed: of the initial centroids; the features are public, so no privacy hangs on it.
        balanced: give the coarse clusters about as many public images each (`_balance`).

    Raises:
        DataError: fewer distinct public images than fine centroids.
        SetupError: more coarse clusters than groups, or more groups than fine centroids.
    """
    if not num_coarse <= num_groups <= num_fine:
        got = f"{num_coarse} coarse clusters, {num_groups} groups, {num_fine} fine centroids"
        raise SetupError("clustering", expected="no more coarse clusters than groups than fine centroids", got=got)
    distinct = len(torch.unique(features, dim=0))
    if distinct < num_fine:
        raise DataError("public images", expected=f"at least {num_fine}, one per fine centroid", got=str(distinct))
    x_ND = features.double().numpy()
    fine_N, centroids_FD = _k_means(x_ND, np.ones(len(x_ND)), num_fine, seed)
    weight_F = np.bincount(fine_N, minlength=num_fine).astype(np.float64)
    group_F, centre_GD = _k_means(centroids_FD, weight_F, num_groups, seed + 1)
    weight_G = np.bincount(group_F, weight_F, minlength=num_groups).astype(np.float64)
    coarse_G, centre_CD = _k_means(centre_GD, weight_G, num_coarse, seed + 2)
    if balanced:
        coarse_G = _balance(centre_GD, weight_G, centre_CD)
    return Clusters(
        centroids_FD=torch.from_numpy(centroids_FD).float(),
        coarse_F=torch.from_numpy(coarse_G[group_F]),
        group_F=torch.from_numpy(group_F),
    )


def _balance(
    x_GD: NDArray[np.float64], weight_G: NDArray[np.float64], centre_CD: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the cluster of each row such that clusters weigh about the same, at least total squared distance.

    A few rounds of Lloyd's algorithm whose assignment is a transport problem with equal capacities. Its solution splits
    fewer rows than there are clusters; a split row goes where most of it is, so that a cluster is off its equal share
    by less than these rows weigh.
    """
    num_rows, num_clusters = len(x_GD), len(centre_CD)
    whole = sparse.kron(sparse.eye(num_rows), np.ones((1, num_clusters)))
    load = sparse.kron(weight_G[None], sparse.eye(num_clusters))
    equal_C = np.full(num_clusters, weight_G.sum() / num_clusters)
    coarse_G = np.zeros(num_rows, dtype=np.int64)
    for _ in range(_BALANCING_ROUNDS):
        cost_GC = weight_G[:, None] * ((x_GD[:, None] - centre_CD) ** 2).sum(2)
        found = linprog(cost_GC.ravel(), A_eq=sparse.vstack([whole, load]), b_eq=np.r_[np.ones(num_rows), equal_C])
        if not found.success:
            raise NumericalError("balancing", expected="equal clusters", got="none found")
        before, coarse_G = coarse_G, found.x.reshape(num_rows, num_clusters).argmax(1).astype(np.int64)
        if np.array_equal(before, coarse_G):
            break
        own_GC = np.eye(num_clusters)[coarse_G] * weight_G[:, None]
        centre_CD = (own_GC.T @ x_GD) / np.maximum(own_GC.sum(0), 1e-12)[:, None]
    return coarse_G


def _k_means(
    x: NDArray[np.float64], weight: NDArray[np.float64], num: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each row's cluster and the centroids."""
    if num == len(x):
        return np.arange(num), x
    # Only fitting needs scikit-learn, whose import takes more than a second; every command that opens a plan assigns.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            model = KMeans(num, n_init=4, random_state=seed % 2**32).fit(x, sample_weight=weight)
        except ConvergenceWarning as error:
            raise DataError("public images", expected=f"{num} distinct clusters", got="fewer") from error
    return model.labels_.astype(np.int64), np.asarray(model.cluster_centers_, dtype=np.float64)
