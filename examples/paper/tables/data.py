"""The data sets of the tables, split once: into training, public, validation and test images."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.encoders.pca import PcaEncoder
from ddm.errors import DataError, MissingFileError, SetupError
from ddm.images.idx import labels_beside, read_idx
from ddm.images.npz import npz_names, read_array
from ddm.io.files import require_file
from ddm.protocol.base import sha256_hex
from ddm.protocol.data import DataSpec

# Shape legend: N images, S silos.

DatasetName = Literal["digits", "fashion-mnist", "cxr", "npz"]
UNEQUAL = (0.7, 0.2, 0.08, 0.02)
CONCENTRATION = 0.5
_MAX_BYTES = 1 << 34
_PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Part:
    """Images with their classes.

    Attributes:
        images: shape (N, C, H, W), float32, in [-1, 1].
        label_N: the class of each, int64.
    """

    images: Tensor
    label_N: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def at(self, rows: Tensor) -> "Part":
        """Return the images of these rows."""
        return Part(self.images[rows], self.label_N[rows])


@dataclass(frozen=True)
class World:
    """A data set, split. The split is the same for every seed, so that all figures are of one reference.

    Attributes:
        name: the data set's.
        train: what monolith and experts are trained on.
        public: what the classifier and the second feature space are fitted on.
        validation: what rates are chosen on.
        test: what figures are taken against, and nothing else.
        base: images of another origin, which the public base of table 11 learns; None for public images.
    """

    name: str
    train: Part
    public: Part
    validation: Part
    test: Part
    base: Part | None = None

    def with_base(self, path: Path) -> "World":
        """Return it with a file's images as those of the public base; the name says which.

        Raises:
            MissingFileError, DataError: no such file, or images of another shape.
        """
        part = _npz(path)
        expected = self.train.images.shape[1:]
        if part.images.shape[1:] != expected:
            raise DataError(
                path.name,
                expected=f"images of shape {tuple(expected)}",
                got=f"{tuple(part.images.shape[1:])}",
            )
        digest = sha256_hex(part.images.numpy().tobytes())
        return replace(self, name=f"{self.name}, base {path.stem} ({digest[:8]})", base=part)

    @property
    def data(self) -> DataSpec:
        """Shape and range of an image."""
        return DataSpec(shape=tuple(self.train.images.shape[1:]), range=(-1.0, 1.0))

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return int(self.train.label_N.max()) + 1

    def unequal(self, images: Tensor) -> Tensor:
        """Return which of four silos of very unequal sizes an image lies in, int64 (N,).

        The silos are cut along the first principal component of public images at the quantiles of the training images,
        so that an image alone decides, and the silo of a test image, or of a sample, is known.
        """
        encoder = PcaEncoder.fit(self.public.images, 1)
        edges = torch.tensor(UNEQUAL[:-1], dtype=torch.float64).cumsum(0)
        cuts = encoder.encode(self.train.images)[:, 0].double().quantile(edges)
        return torch.bucketize(encoder.encode(images)[:, 0].double(), cuts)

    def silos(self, num: int, seed: int, concentration: float = CONCENTRATION) -> Tensor:
        """Return silos of the training images whose mixes of classes are Dirichlet, int64 (N,)."""
        rng = np.random.default_rng([seed, num])
        share_CS = rng.dirichlet([concentration] * num, size=self.num_classes)
        return _drawn_silos(share_CS, self.train.label_N, rng)

    def silos_of_test_images(
        self, num: int, seed: int, concentration: float = CONCENTRATION
    ) -> Tensor:
        """Return silos of the test images with the same mixes of classes as `silos`, int64 (N,)."""
        share_CS = np.random.default_rng([seed, num]).dirichlet(
            [concentration] * num, size=self.num_classes
        )
        return _drawn_silos(share_CS, self.test.label_N, np.random.default_rng([seed, num, 1]))


def read_world(name: DatasetName, path: Path | None) -> World:
    """Read a data set and split it.

    Args:
        name: the data set.
        path: digits need none; fashion-mnist, the folder of its four idx files; cxr, the npz of PneumoniaMNIST; npz,
            a file with `images` and `labels`.

    Raises:
        SetupError: no path where one is needed.
        MissingFileError, DataError: nothing there, or something else.
    """
    if name == "digits":
        return _divided(name, _digits(), None)
    if path is None:
        raise SetupError(
            "--data",
            expected=f"the files of {name}",
            got="no path",
            remedy="Name them: --data PATH.",
        )
    if name == "fashion-mnist":
        return _divided(name, _idx(path, "train"), _idx(path, "t10k"))
    return _divided(name, *(_pneumonia(path) if name == "cxr" else (_npz(path), None)))


def _drawn_silos(
    share_CS: NDArray[np.float64], label_N: Tensor, rng: np.random.Generator
) -> Tensor:
    """Draw the silo of every image by the shares of its class."""
    drawn_N = rng.random((len(label_N), 1))
    silo_N = (share_CS.cumsum(1)[label_N.numpy()] < drawn_N).sum(1)
    return torch.from_numpy(silo_N.clip(max=share_CS.shape[1] - 1))


def _divided(name: str, rest: Part, test: Part | None) -> World:
    """Split by a fixed seed: public a quarter, validation an eighth; test a fifth where the data set has none."""
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
    if test is None:
        num = len(order) // 5
        test = rest.at(order[:num])
        order = order[num:]
    public = len(order) // 4
    validation = len(order) // 8
    parts = torch.split(order, [public, validation, len(order) - public - validation])
    return World(name, rest.at(parts[2]), rest.at(parts[0]), rest.at(parts[1]), test)


def _part(images: NDArray[Any], labels: NDArray[Any], *, levels: float = 127.5) -> Part:
    """Return pixels from 0 to twice `levels` as images in [-1, 1]."""
    pixels = torch.from_numpy((images / levels - 1).astype(np.float32))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels
    return Part(pixels.contiguous(), torch.from_numpy(labels.reshape(-1).astype(np.int64)))


def _digits() -> Part:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return _part(digits.images, digits.target, levels=8.0)


def _idx(folder: Path, part: str) -> Part:
    images = folder / f"{part}-images-idx3-ubyte.gz"
    if not images.is_file():
        remedy = "Name the folder that holds Fashion-MNIST's four idx gz files."
        raise MissingFileError(
            str(folder), expected=images.name, got="a folder without it", remedy=remedy
        )
    return _part(read_idx(images), read_idx(labels_beside(images)))


def _pneumonia(path: Path) -> tuple[Part, Part]:
    require_file(path, "the npz of PneumoniaMNIST")
    if missing := {f"{part}_{what}" for part in _PARTS for what in ("images", "labels")} - set(
        npz_names(path)
    ):
        raise DataError(
            path.name, expected="the arrays of PneumoniaMNIST", got=f"none called {min(missing)}"
        )
    images, labels = (
        {part: read_array(path, f"{part}_{what}", max_bytes=_MAX_BYTES) for part in _PARTS}
        for what in ("images", "labels")
    )
    rest = _part(*(np.concatenate([of["train"], of["val"]]) for of in (images, labels)))
    return rest, _part(images["test"], labels["test"])


def _npz(path: Path) -> Part:
    require_file(path, "an npz with images and labels")
    images, labels = (read_array(path, name, max_bytes=_MAX_BYTES) for name in ("images", "labels"))
    fits = labels.size == len(images) > 0 and labels.dtype.kind in "iu" and labels.min() >= 0
    if not fits or images.ndim not in (3, 4):
        got = f"images {images.shape}, labels {labels.shape} of {labels.dtype}"
        expected = "images (N, H, W) or (N, C, H, W), and for each a class, a whole number from 0"
        raise DataError(path.name, expected=expected, got=got)
    if images.dtype == np.uint8:
        return _part(images, labels)
    if images.dtype.kind != "f" or not (images.min() >= -1 and images.max() <= 1):  # NaN is neither
        got = f"{images.dtype}, {images.min():g} to {images.max():g}"
        raise DataError(path.name, expected="images in uint8, or floats in [-1, 1]", got=got)
    return _part((images + 1).astype(np.float64), labels, levels=1.0)
