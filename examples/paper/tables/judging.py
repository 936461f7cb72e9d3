"""Judges samples: FID, KID, precision and recall in the features of a small classifier, FID in those of the encoder."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.encoders.pca import PcaEncoder
from ddm.errors import SetupError
from ddm.evaluation.classifier import Classifier, digest_of_training, train_classifier
from ddm.evaluation.intervals import proportion, wilson
from ddm.evaluation.metrics import FeatureSet, measure
from ddm.protocol.base import Model, sha256_file
from ddm.system.progress import ProgressCallback
from examples.paper.tables.clock import Clock
from examples.paper.tables.data import UNEQUAL, World
from examples.paper.tables.presets import Preset
from examples.paper.tables.results import Figure, Kept
from examples.paper.tables.sharing import alone

NEIGHBOURS = 5
CLASSIFIER = "classifier.safetensors"
# With fewer reference images than this for each feature, their covariance says little, and FID is far too high.
_IMAGES_PER_FEATURE = 4
_SHOWN = ("fid", "kid", "precision", "recall")


class Judged(Model):
    """What judges.

    Attributes:
        digest: sha256 of the classifier's file.
        accuracy: on the test images.
    """

    digest: str
    accuracy: float


@dataclass(frozen=True)
class Judge:
    """The reference, ready to judge samples.

    Attributes:
        world: the data set.
        classifier: trained on the public images and their classes.
        encoder: principal components of the public images.
        about: the classifier.
        test: the test images by the classifier's features.
        test_pca: the same by the encoder's.
        validation: the validation images by the classifier's.
        silo_M: which of the unequal silos each test image lies in.
    """

    world: World
    classifier: Classifier
    encoder: PcaEncoder
    about: Judged
    test: FeatureSet
    test_pca: FeatureSet
    validation: FeatureSet
    silo_M: Tensor

    @classmethod
    def open(cls, world: World, preset: Preset, out: Path, clock: Clock) -> "Judge":
        """Train the classifier, or open the one that is there, and encode the reference.

        Raises:
            SetupError: the one that is there was trained on other images: the folder is of another data set.
        """
        path = out / CLASSIFIER
        remedy = "Give the --data of the earlier run, or another --out."
        with alone(out, path.stem, wait=True):
            classifier = open_classifier(
                path, world, preset.classifier_steps, clock.progress, remedy
            )
        test = world.test
        encoder = PcaEncoder.fit(world.public.images, preset.pca_dim)
        kept = Kept(out / "cells")
        key = ("classifier", sha256_file(path), world.name)
        judged = kept.read(key, Judged)
        if judged is None:
            judged = Judged(
                digest=sha256_file(path), accuracy=classifier.accuracy(test.images, test.label_N)
            )
            kept.write(key, judged)
        return cls(
            world,
            classifier,
            encoder,
            judged,
            FeatureSet.of(classifier.encode(test.images), NEIGHBOURS),
            FeatureSet.of(encoder.encode(test.images), NEIGHBOURS),
            FeatureSet.of(classifier.encode(world.validation.images), NEIGHBOURS),
            world.unequal(test.images),
        )

    def validation_fid(self, images: Tensor) -> float:
        """Return the FID against the validation images, by which rates are chosen."""
        return measure(FeatureSet.of(self.classifier.encode(images), NEIGHBOURS), self.validation)[
            0
        ]["fid"].value

    @property
    def min_reference(self) -> int:
        """The least number of test images against which an FID is measured."""
        return _IMAGES_PER_FEATURE * self.test.features_ND.shape[1]

    def fid(self, images: Tensor, rows: Tensor | None = None) -> Figure:
        """Return the FID against the test images, or some of them.

        Args:
            images: samples in the data's range.
            rows: which test images; None for all.
        """
        reference = self.test
        if rows is not None:
            reference = FeatureSet.of(self.test.features_ND[rows], NEIGHBOURS)
        samples = FeatureSet.of(self.classifier.encode(images), NEIGHBOURS)
        return Figure.of(measure(samples, reference)[0]["fid"])

    def agreement(self, images: Tensor, classes: Tensor) -> Figure:
        """Return the share of samples in which the classifier finds the class that they were asked for."""
        share = self.classifier.accuracy(images, classes)
        low, high = wilson(round(share * len(images)), len(images))
        return Figure(value=share, low=low, high=high)

    def figures(self, images: Tensor, *, of_silos: bool) -> dict[str, Figure]:
        """Return all figures against the test images.

        Args:
            images: samples in the data's range.
            of_silos: also the smallest unequal silo's share of what was drawn, and the recall of its test images.
        """
        metrics, both = measure(
            FeatureSet.of(self.classifier.encode(images), NEIGHBOURS), self.test
        )
        figures = {name: Figure.of(metrics[name]) for name in _SHOWN}
        by_encoder = measure(FeatureSet.of(self.encoder.encode(images), NEIGHBOURS), self.test_pca)[
            0
        ]
        figures["fid_pca"] = Figure.of(by_encoder["fid"])
        if of_silos:
            smallest = len(UNEQUAL) - 1
            figures["smallest_drawn"] = Figure.of(
                proportion(self.world.unequal(images) == smallest)
            )
            figures["smallest_recall"] = Figure.of(
                proportion(both.recalled_M[self.silo_M == smallest])
            )
        return figures


def open_classifier(
    path: Path,
    world: World,
    num_steps: int,
    progress: Callable[[str], AbstractContextManager[ProgressCallback]],
    remedy: str,
) -> Classifier:
    """Open the classifier of a data set's public images; where there is no file yet, train it.

    Raises:
        SetupError: it was trained on other images; `remedy` says what to do.
    """
    public = world.public
    if not path.exists():
        with progress("training the classifier on public images") as report_progress:
            train_classifier(
                public.images,
                public.label_N,
                world.data,
                num_steps=num_steps,
                on_progress=report_progress,
            ).save(path)
    classifier = Classifier.load(path)
    if classifier.trained_on != digest_of_training(public.images, public.label_N):
        raise SetupError(
            str(path),
            expected=f"a classifier of the public images of {world.name}",
            got="one of other images",
            remedy=remedy,
        )
    return classifier


def clipped(images: Tensor) -> Tensor:
    """Return samples in the data's range."""
    return torch.as_tensor(images).clamp(-1.0, 1.0)
