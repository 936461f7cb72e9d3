"""Splits a data set into the experiment's world: silos whose images have the classes in different proportions.

Classes go to silos by Dirichlet(0.5) shares, so who holds an image depends on its class alone. Hence the exact
``p(k | class)`` is known for every test image, and cross-entropies are taken against it instead of one drawn silo.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.images.idx import read_idx

CONCENTRATION = 0.5


@dataclass(frozen=True)
class Dataset:
    """What is taken from a data set.

    Attributes:
        name: as on the command line.
        num_silos: K.
        num_private: images dealt to silos; the rest of the training images is public.
        num_held_out: public images that nothing is fitted on but a router's temperature.
        num_groups: public groups of the counts statistic.
        rank: dimensions of the public sketch, R.
        released_rank: how many of them the sketch statistic has.
        pca_dim: features of the encoders `pca` and `hog`.
        hog_groups: public groups of features of `hog`.
    """

    name: str
    num_silos: int
    num_private: int
    num_held_out: int
    num_groups: int
    rank: int
    released_rank: int
    pca_dim: int
    hog_groups: int = 0


DATASETS = {
    "fashion-mnist": Dataset(
        "fashion-mnist",
        8,
        48_000,
        2000,
        num_groups=64,
        rank=64,
        released_rank=12,
        pca_dim=64,
        hog_groups=128,
    ),
    "digits": Dataset("digits", 3, 900, 120, num_groups=32, rank=32, released_rank=12, pca_dim=32),
}


@dataclass(frozen=True)
class PrivateWorld:
    """One split of a data set.

    Attributes:
        dataset: what it was made from.
        public: public images (P, 1, H, W) in [-1, 1].
        held_out: further public images.
        public_label: their classes; used only where an encoder is trained on them.
        silos: each silo's private images.
        test: images of nobody, (N, 1, H, W).
        soft_NK: p(k | class) of each test image, from the silos' true class counts.
    """

    dataset: Dataset
    public: Tensor
    held_out: Tensor
    public_label: Tensor
    silos: tuple[Tensor, ...]
    test: Tensor
    soft_NK: Tensor

    @property
    def num_units(self) -> list[int]:
        """Images of each silo."""
        return [len(images) for images in self.silos]

    @property
    def prior_K(self) -> Tensor:
        """Each silo's share of all private images."""
        sizes_K = torch.tensor(self.num_units, dtype=torch.float64)
        return sizes_K / sizes_K.sum()

    def grouped_by(self, encoder: str) -> "PrivateWorld":
        """Return it with as many groups as suit an encoder."""
        num = self.dataset.hog_groups if encoder == "hog" else self.dataset.num_groups
        return replace(self, dataset=replace(self.dataset, num_groups=num))


def make_world(dataset: Dataset, data: Path | None, seed: int) -> PrivateWorld:
    """Split a data set into public, private and test images and deal the private ones to silos."""
    (x, label), (test, test_label) = (
        _digits(seed) if dataset.name == "digits" else _fashion_mnist(data)
    )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    first = dataset.num_private + dataset.num_held_out
    private = order[: dataset.num_private]
    held_out = order[dataset.num_private : first]
    public = order[first:]
    num_classes = int(label.max()) + 1
    share_CK = rng.dirichlet([CONCENTRATION] * dataset.num_silos, size=num_classes)
    silo = (
        (share_CK.cumsum(1)[label[private]] < rng.random((len(private), 1)))
        .sum(1)
        .clip(max=dataset.num_silos - 1)
    )
    held_CK = np.zeros((num_classes, dataset.num_silos))
    np.add.at(held_CK, (label[private], silo), 1.0)
    return PrivateWorld(
        dataset=dataset,
        public=_images(x[public]),
        held_out=_images(x[held_out]),
        public_label=torch.from_numpy(label[public]),
        silos=tuple(_images(x[private][silo == k]) for k in range(dataset.num_silos)),
        test=_images(test),
        soft_NK=torch.from_numpy((held_CK / held_CK.sum(1, keepdims=True))[test_label]),
    )


Split = tuple[NDArray[np.float32], NDArray[np.int64]]


def _digits(seed: int) -> tuple[Split, Split]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 8.0 - 1.0).astype(np.float32)
    label = digits.target.astype(np.int64)
    order = np.random.default_rng([seed, 1]).permutation(len(images))
    test = order[:400]
    rest = order[400:]
    return (images[rest], label[rest]), (images[test], label[test])


def _fashion_mnist(data: Path | None) -> tuple[Split, Split]:
    if data is None or not (data / "train-images-idx3-ubyte.gz").is_file():
        raise SystemExit(
            "--data: expected the folder with Fashion-MNIST's four idx gz files (train-images-idx3-ubyte.gz ...), "
            f"got {f'{data}, which lacks them' if data else 'no folder'}."
        )

    def split(part: str) -> Split:
        pixels = read_idx(data / f"{part}-images-idx3-ubyte.gz").astype(np.float32)
        return pixels / 127.5 - 1.0, read_idx(data / f"{part}-labels-idx1-ubyte.gz").astype(
            np.int64
        )

    return split("train"), split("t10k")


def _images(pixels: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels))[:, None]
