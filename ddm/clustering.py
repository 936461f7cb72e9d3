"""To which public cell does a feature belong? Fine k-means centroids, grouped twice: coarse clusters and groups."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError, PolicyError, SetupError, ShapeError
from ddm.tensors import TensorSpec

# Shape legend: N features, F fine centroids, D values of one feature.

_BLOCK = 8192


@dataclass(frozen=True)
class Clusters:
    """Two-level public clusters.

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

        Args:
            features: shape (N, D), as the plan's encoder makes them.

        Raises:
            ShapeError: features of another dimension.
        """
        if features.ndim != 2 or features.shape[1] != self.centroids_FD.shape[1]:
            expected = f"(N, {self.centroids_FD.shape[1]})"
            raise ShapeError("features", expected=expected, got=str(tuple(features.shape)))
        centre_D = self.centroids_FD.mean(0)
        centred_FD = self.centroids_FD - centre_D  # far from the origin, |c|^2 - 2 x.c would cancel
        offset_F = centred_FD.square().sum(1) / 2
        scores = (offset_F - (block - centre_D) @ centred_FD.T for block in torch.split(features.float(), _BLOCK))
        return torch.cat([score.argmin(1) for score in scores])

    def groups(self, features: Tensor) -> Tensor:
        """Return the group of each feature in the counts release, shape (N,), int64."""
        return self.group_F[self.assign(features)]

    def check(self, num_coarse: int, num_groups: int) -> None:
        """Refuse received clusters whose indices do not fit the plan.

        Raises:
            PolicyError: a centroid is not finite, or names a coarse cluster or group that the plan does not have.
        """
        if not torch.isfinite(self.centroids_FD).all():
            raise PolicyError("the plan's centroids", expected="finite numbers", got="others")
        for name, index_F, most in (("coarse cluster", self.coarse_F, num_coarse), ("group", self.group_F, num_groups)):
            if int(index_F.min()) < 0 or int(index_F.max()) >= most:
                raise PolicyError(f"the plan's {name} indices", expected=f"0 to {most - 1}", got="others")

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of these clusters."""
        return {"centroids": self.centroids_FD, "coarse": self.coarse_F, "group": self.group_F}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Clusters":
        """Rebuild the clusters from tensors loaded against `cluster_specs`."""
        return cls(centroids_FD=tensors["centroids"], coarse_F=tensors["coarse"], group_F=tensors["group"])


def cluster_specs(num_fine: int, dim: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of stored clusters of `dim` features."""
    index = TensorSpec("I64", (num_fine,))
    return {"centroids": TensorSpec("F32", (num_fine, dim)), "coarse": index, "group": index}


def fit_clustering(features: Tensor, num_fine: int, num_coarse: int, num_groups: int, seed: int) -> Clusters:
    """Cluster public features by k-means, then the centroids, weighted by their images, twice more.

    Args:
        features: public features, shape (N, D).
        num_fine: number of fine centroids.
        num_coarse: number of coarse clusters, at most `num_fine`.
        num_groups: number of groups in the counts release, at most `num_fine`.
        seed: of the initial centroids; the features are public, so no privacy hangs on it.

    Raises:
        DataError: fewer distinct public images than fine centroids.
        SetupError: more coarse clusters or groups than fine centroids.
    """
    if max(num_coarse, num_groups) > num_fine:
        got = f"{num_coarse} coarse clusters and {num_groups} groups"
        raise SetupError("clustering", expected=f"at most {num_fine}, the number of fine centroids", got=got)
    distinct = len(torch.unique(features, dim=0))
    if distinct < num_fine:
        raise DataError("public images", expected=f"at least {num_fine}, one per fine centroid", got=str(distinct))
    x_ND = features.double().numpy()
    fine_N, centroids_FD = _k_means(x_ND, np.ones(len(x_ND)), num_fine, seed)
    weight_F = np.bincount(fine_N, minlength=num_fine).astype(np.float64)
    coarse_F, _ = _k_means(centroids_FD, weight_F, num_coarse, seed + 1)
    group_F, _ = _k_means(centroids_FD, weight_F, num_groups, seed + 2)
    return Clusters(
        centroids_FD=torch.from_numpy(centroids_FD).float(),
        coarse_F=torch.from_numpy(coarse_F),
        group_F=torch.from_numpy(group_F),
    )


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
