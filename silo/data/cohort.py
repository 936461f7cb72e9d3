"""Reads private images with their patients, classes and captions; file names and patient identifiers stop here."""

# Shape legend: N images, U units (patients or images).
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays, open_images, open_latents
from ddm.images.columns import captions_of, class_numbers, names_of, numbered, read_column
from ddm.images.find import DataKind
from ddm.images.patients import PatientRule, order_key, order_of
from ddm.images.rows import Images, feed
from ddm.images.store import ORDERS, StoredCohort
from ddm.images.transform import Transform
from ddm.protocol.base import Unit
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from ddm.system.progress import ProgressCallback
from silo.data.transformed import RequiredColumns, open_transformed
from silo.images.source import ImageSource


@dataclass(frozen=True)
class Cohort:
    """The images this site trains on.

    Attributes:
        images: shape (N, C, H, W), or (N, C, D, H, W) for volumes, float32, in the plan's range; read on access.
        digest: see `dataset_digest`.
        unit_N: privacy unit of each image, int64: its patient, numbered by first appearance, or the image itself.
        num_units: number of units.
        label_N: class of each image, int64; None for a plan without classes.
        captions: text of each image, blank if it has none; None for a plan without texts. Never shown.
        text_NLD: the captions as vectors, the experts' text condition; see `silo.data.captions`.
        latent: whether `images` are latents that the site brings, not yet divided by the plan's `scale`.
        rank_U: secret random order of the units, float64, the same in every cohort of the same units.
        per_picture: number of images that each picture of the site became.
    """

    images: Images
    digest: str
    unit_N: Tensor
    num_units: int
    label_N: Tensor | None
    captions: tuple[str, ...] | None = field(default=None, repr=False)
    text_NLD: Tensor | None = field(default=None, repr=False)
    latent: bool = False
    rank_U: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)
    per_picture: int = 1

    @property
    def num_pictures(self) -> int:
        """Number of pictures before the plan's transform, as the site's card and policy count them."""
        return len(self.images) // self.per_picture


@dataclass(frozen=True)
class CohortRequest:
    """What a plan and the site's policy require of the site's images.

    Attributes:
        data: shape and range of the plan.
        min_images: fewest images that plan and policy accept, counted before the plan's transform.
        unit: privacy unit of the plan.
        num_classes: the number of classes of the plan; None if it needs no classes.
        class_names: names that the plan gives its classes, if it does.
        known_classes: the classes that the site declares, all of them among the plan's, in the site's own order; a
            label must be one of these, by name or by its number here.
        captions: whether the plan needs texts.
        latent_shape: shape of one latent; None for a plan whose experts learn images.
        transform: the plan's, if it has one.
    """

    data: DataSpec
    min_images: int
    unit: Unit
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    known_classes: Classes | None = None
    captions: bool = False
    latent_shape: tuple[int, ...] | None = None
    transform: TransformSpec | None = None

    @property
    def plan_classes(self) -> Classes | None:
        """The classes of the plan, if it needs some."""
        if self.num_classes is None:
            return None
        return Classes(self.num_classes, self.class_names)

    @property
    def site_classes(self) -> Classes | None:
        """The classes by which the site labels its images, if the plan needs some."""
        if self.plan_classes is None:
            return None
        return self.known_classes or self.plan_classes

    @property
    def required_columns(self) -> RequiredColumns:
        """What the plan needs to know about each picture."""
        return RequiredColumns(
            patients=self.unit == "patient", classes=self.site_classes, captions=self.captions
        )


def load_cohort(
    source: ImageSource,
    request: CohortRequest,
    salt: bytes,
    folder: Path | None = None,
    advance: ProgressCallback = lambda done, num: None,
) -> Cohort:
    """Read the images of a site once, block by block, and check them against a plan.

    Arrays of the plan's shape are read where they are. With a transform, everything else goes through it once, into a
    copy in `folder`. A plan of volumes without a transform takes volumes in files of their own by the default one.

    Args:
        source: the site's images.
        request: what the plan requires.
        salt: secret of this site, for the digest and for the order of units.
        folder: private to the worker, for copies of what cannot be read in place; None reads all of it into memory.
        advance: see `silo.data.transformed.open_transformed`.

    Raises:
        MissingFileError: nothing at the path.
        DataError: no images, images of the wrong shape or range, not finite, or too few; or a column of patients,
            labels or captions that is absent, of the wrong length, incomplete, out of range or too long.
    """
    arrays, per_picture = _open_arrays(source, request, salt, folder, advance)
    num_images = len(arrays)
    # Pictures are counted, not samples: a plan chooses how many samples a picture becomes.
    num_pictures = num_images // per_picture
    if num_pictures < request.min_images:
        expected = f"at least {request.min_images}, as plan and policy require"
        raise DataError(
            "images",
            expected=expected,
            got=f"{num_pictures}",
            remedy=(
                "Add images. If none can be added, this site cannot take part in this plan: `silo "
                "withdraw SITE`."
            ),
        )
    is_latent = arrays.name == "latents"
    if is_latent and request.latent_shape is None:
        raise DataError(
            "data",
            expected="images: this plan's experts have no autoencoder",
            got="latents",
            remedy="Name images as data in silo.toml, and not latents.",
        )

    # The digest covers the columns that a plan uses, so that the same images with other labels are other data.
    digested_columns = {}
    patient_N = None
    unit_N = np.arange(num_images)
    if request.unit == "patient":
        patient_N = read_column(arrays, "patients")
        unit_N = numbered(patient_N, source.patient_rule)
        digested_columns["patients"] = unit_N
    num_units = int(unit_N.max()) + 1
    # The statistics and clipping of a single unit would be that unit.
    if num_units < 2:
        raise DataError(
            f"{request.unit}s",
            expected="at least 2",
            got="1",
            remedy=(
                "Add images of other patients, or check the column of patients: all images carry the "
                "same entry."
            ),
        )
    label_N = None
    if request.plan_classes is not None and request.site_classes is not None:
        site_labels = read_column(arrays, "labels")
        plan_labels = _labels(site_labels, request.site_classes, request.plan_classes)
        digested_columns["labels"] = plan_labels
        label_N = torch.from_numpy(plan_labels)
    captions = None
    if request.captions:
        captions = captions_of(read_column(arrays, "captions"))

    if is_latent and request.latent_shape is not None:
        images = open_latents(arrays, request.latent_shape, folder)
    else:
        images = open_images(arrays, request.data, folder)
    rank_U = _ranks(unit_N, patient_N, arrays, salt, source.patient_rule)
    return Cohort(
        images=images,
        digest=dataset_digest(images, salt, captions=captions or (), **digested_columns),
        unit_N=torch.from_numpy(unit_N),
        num_units=num_units,
        label_N=label_N,
        captions=captions,
        latent=is_latent,
        rank_U=torch.from_numpy(rank_U),
        per_picture=per_picture,
    )


def _open_arrays(
    source: ImageSource,
    request: CohortRequest,
    salt: bytes,
    folder: Path | None,
    advance: ProgressCallback,
) -> tuple[ImageArrays, int]:
    """Return the images as arrays, transformed if the plan says so, and how many each picture became."""
    data = source.find()
    spec = request.transform
    if spec is None and len(request.data.shape) == 4 and not data.looks_like_arrays:
        # Volumes in files of their own have no other way into a plan.
        spec = TransformSpec()
    if spec is None or data.kind is DataKind.LATENTS:
        return source.arrays(data), 1
    if folder is None:
        raise TypeError("a plan with a transform needs a folder for the copy that it makes")
    transform = Transform(spec, request.data)
    ordered = source.ordered_by(order_key(salt))
    arrays = open_transformed(ordered, transform, request.required_columns, folder, advance)
    return arrays, transform.num


def _labels(label_N: NDArray[np.generic], site: Classes, plan: Classes) -> NDArray[np.int64]:
    """Return the class of each image as the plan numbers it; the site wrote numbers by its own order of the names."""
    # From the site's numbers to the plan's, by the names of the classes.
    names = [site.name(number) for number in range(site.num)]
    site_names = np.array(names)
    # The same number may mean another class to the plan, whose order of the names is its own.
    plan_number_C = class_numbers(site_names, plan, "data.classes")
    # Shape (C,) indexed by (N,): the plan's number of the class of each image.
    return plan_number_C[class_numbers(label_N, site)]


def _ranks(
    unit_N: NDArray[np.int64],
    patient_N: NDArray[np.generic] | None,
    arrays: ImageArrays,
    salt: bytes,
    patient_rule: PatientRule,
) -> NDArray[np.float64]:
    """Return a random number for each unit: for a patient by the identifier, for an image by its place in the data.

    It is keyed with the site's secret, so that nobody else can tell the order. Units that are added later change
    nobody's number; if the unit is the image, this holds only for units added behind the others.
    """
    if patient_N is None:
        digest = hmac.new(salt, b"order of images", hashlib.sha256).digest()
        # A counter-based generator gives the n-th image the same number, however many images follow it.
        key = np.frombuffer(digest[:16], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        return generator.random(len(unit_N))
    _, first_U = np.unique(unit_N, return_index=True)
    if isinstance(arrays, StoredCohort):
        # The copy knows patients by number alone, and keeps the digests that order them in a column.
        order_N = read_column(arrays, ORDERS)
        orders = [str(order) for order in order_N[first_U].tolist()]
    else:
        secret = order_key(salt)
        names = names_of(patient_N[first_U])
        orders = [order_of(name, secret, patient_rule) or "" for name in names]
    # The first 64 bits of each digest as a number in [0, 1).
    first_bits = [int(order[:16], 16) for order in orders]
    return np.array([bits / 2**64 for bits in first_bits])


def dataset_digest(
    images: Images, salt: bytes, *, captions: Sequence[str] = (), **columns: NDArray[np.int64]
) -> str:
    """Return the HMAC-SHA256 of the images' shape and float32 values and of the columns used.

    It is keyed with a secret of this site because ledger entries contain it and their digests are published: without
    the key, anybody who knows all images but one could try candidates for the last one.
    """
    shape_text = repr(tuple(images.shape))
    digest = hmac.new(salt, shape_text.encode(), hashlib.sha256)
    # Block by block, since the images may be larger than memory.
    feed(digest.update, images)
    # Sorted: the order in which a caller names columns must not change the digest.
    for name in sorted(columns):
        # Of one byte order, so that the digest is the same on every machine.
        values = columns[name].astype("<i8")
        digest.update(name.encode() + values.tobytes())
    for caption in captions:
        text = caption.encode()
        # With its length, or two captions could give the digest of two others that are cut elsewhere.
        digest.update(b"caption %d " % len(text) + text)
    return digest.hexdigest()
