"""Reads private images with their patients, classes and captions; file names and patient identifiers stop here."""

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
from ddm.images.array_files import Source, open_arrays, open_images, open_latents
from ddm.images.columns import captions_of, names_of, numbered, read_column
from ddm.images.labels import class_numbers
from ddm.images.patients import order_key, order_of
from ddm.images.public import picture_files
from ddm.images.rows import Images, feed
from ddm.images.store import ORDERS, StoredCohort
from ddm.images.table import is_table
from ddm.images.transform import Transform
from ddm.protocol.base import Unit
from ddm.protocol.classes import Classes
from ddm.protocol.plan import DataSpec, TransformSpec
from silo.config import ImagesSettings
from silo.data.transformed import Advance, Asked, open_transformed


@dataclass(frozen=True)
class Cohort:
    """The images this site trains on.

    Attributes:
        images: shape (N, C, H, W), or (N, C, D, H, W) of volumes, float32, in the plan's range; read when they are
            asked for.
        digest: see `dataset_digest`.
        unit_N: the privacy unit of each image, int64: its patient, numbered by first appearance, or the image itself.
        num_units: how many units there are.
        label_N: each image's class, int64; None for a plan without classes.
        captions: each image's text, blank where it has none; None for a plan without texts. Never shown.
        text_NLD: the captions as vectors, the experts' text condition; see `silo.data.captions`.
        latent: whether `images` are latents that the site brings, not over the plan's `scale`.
        rank_U: a secret random order of the units, float64, which is the same in every cohort of the same units.
        per_picture: how many images each picture of the site became.
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
        """How many pictures there are before the plan's transform, as the site's card and policy count them."""
        return len(self.images) // self.per_picture


def load_cohort(
    path: Path,
    spec: DataSpec,
    *,
    min_images: int,
    salt: bytes,
    unit: Unit,
    num_classes: int | None,
    captions: bool = False,
    latent_shape: tuple[int, ...] | None = None,
    folder: Path | None = None,
    transform: TransformSpec | None = None,
    class_names: tuple[str, ...] = (),
    known_classes: Classes | None = None,
    settings: ImagesSettings | None = None,
    advance: Advance = lambda done, num: None,
) -> Cohort:
    """Read `path` once, block by block, and check it against the plan.

    Args:
        path: images or, for a plan with an autoencoder, its latents (see `ddm.images.array_files.open_arrays`), with
            `patients`, shape (N,), numbers or text, read where the patient is the unit; `labels`, shape (N,), names of
            classes or whole numbers in [0, num_classes), read where the plan needs classes; `captions`, text, read
            where it needs texts. With a transform, whatever a scan takes, see
            `silo.data.transformed.open_transformed`; without one, that goes through the defaults if the plan is one of
            volumes.
        spec: the plan's shape and range.
        min_images: fewest images that the plan and this site accept, counted before the plan's transform.
        salt: this site's, for the digest.
        unit: the plan's.
        num_classes: the plan's, None where it needs no classes.
        captions: whether the plan needs texts.
        latent_shape: of a latent, None for a plan whose experts are trained on the images.
        folder: private to the worker, for what cannot be read where it lies; None reads all of it into memory.
        transform: the plan's, where it has one: every picture goes through it once, into a copy in `folder`.
        class_names: what the plan calls its classes, where it names them.
        known_classes: which ones the site declares, all of them among the plan's, in an order of its own; a label
            must be one of these, by name or by its number here.
        settings: the site's, for images that are scanned.
        advance: see `silo.data.transformed.open_transformed`.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no images, images of the wrong shape or range, not finite, or too few; or a column of patients,
            labels or captions that is absent, of the wrong length, incomplete, out of range or too long.
    """
    classes = None if num_classes is None else Classes(num_classes, class_names)
    known = classes and (known_classes or classes)
    if transform is None and len(spec.shape) == 4 and _in_files(path, settings):
        transform = TransformSpec()
    per_picture = 1
    if transform:
        if folder is None:
            raise TypeError("a plan with a transform needs a folder for the copy that it makes")
        asked = Asked(unit == "patient", known, captions, order_key(salt))
        carried_out = Transform(transform, spec)
        source = open_transformed(path, carried_out, asked, folder, settings, advance)
        per_picture = 1 if source.name == "latents" else carried_out.num
    else:
        source = open_arrays(path)
    num, latent = len(source), source.name == "latents"
    if num // per_picture < min_images:
        got = f"{num // per_picture}"
        raise DataError("images", expected=f"at least {min_images}, as plan and policy require", got=got)
    if latent and latent_shape is None:
        raise DataError("data", expected="images: this plan's experts have no autoencoder", got="latents")
    patient_N = read_column(source, "patients") if unit == "patient" else None
    unit_N = np.arange(num) if patient_N is None else numbered(patient_N)
    label_N = _labels(read_column(source, "labels"), known, classes) if known and classes else None
    texts = captions_of(read_column(source, "captions")) if captions else None
    if int(unit_N.max()) < 1:
        raise DataError(f"{unit}s", expected="at least 2", got="1")
    images = (
        open_latents(source, latent_shape, folder) if latent and latent_shape else open_images(source, spec, folder)
    )
    columns = {"patients": unit_N if unit == "patient" else None, "labels": label_N}
    used = {name: value for name, value in columns.items() if value is not None}
    return Cohort(
        images=images,
        digest=dataset_digest(images, salt, captions=texts or (), **used),
        unit_N=torch.from_numpy(unit_N),
        num_units=int(unit_N.max()) + 1,
        label_N=None if label_N is None else torch.from_numpy(label_N),
        captions=texts,
        latent=latent,
        rank_U=torch.from_numpy(_ranks(unit_N, patient_N, source, salt)),
        per_picture=per_picture,
    )


def _labels(label_N: NDArray[np.generic], known: Classes, classes: Classes) -> NDArray[np.int64]:
    """Return each image's class as the plan numbers it; a number means what the site, which wrote it, calls by it."""
    number_C = class_numbers(np.array([known.name(number) for number in range(known.num)]), classes, "data.classes")
    return number_C[class_numbers(label_N, known)]


def _ranks(
    unit_N: NDArray[np.int64], patient_N: NDArray[np.generic] | None, source: Source, salt: bytes
) -> NDArray[np.float64]:
    """Return a random number for each unit: of a patient by the identifier, of an image by its place in the data.

    It is keyed with the site's secret, so that nobody else can tell the order. Units that are added later change
    nobody's number; where the unit is the image, only those behind the others.
    """
    if patient_N is None:
        key = hmac.new(salt, b"order of images", hashlib.sha256).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], np.uint64))).random(len(unit_N))
    _, first_U = np.unique(unit_N, return_index=True)
    if isinstance(source, StoredCohort):  # which knows patients by number alone
        orders = [str(each) for each in read_column(source, ORDERS)[first_U].tolist()]
    else:
        key = order_key(salt)
        orders = [order_of(name, key) or "" for name in names_of(patient_N[first_U])]
    return np.array([int(each[:16], 16) / 2**64 for each in orders])


def _in_files(path: Path, settings: ImagesSettings | None) -> bool:
    """Whether data are pictures in files of their own, or a table of them, and no arrays."""
    if path.is_file() and is_table(path, settings.columns if settings else {}):
        return True
    return picture_files(path) is not None


def dataset_digest(images: Images, salt: bytes, *, captions: Sequence[str] = (), **columns: NDArray[np.int64]) -> str:
    """Return the HMAC-SHA256 of the images' shape and float32 values and of the columns used; one change changes it.

    It is keyed with a secret of this site because ledger entries contain it and their digests leave: without the key,
    whoever knows all images but one could try candidates for the last against the ledger's chain.
    """
    keyed = hmac.new(salt, repr(tuple(images.shape)).encode(), hashlib.sha256)
    feed(keyed.update, images)
    for name in sorted(columns):
        keyed.update(name.encode() + columns[name].astype("<i8").tobytes())
    for caption in captions:
        text = caption.encode()
        keyed.update(b"caption %d " % len(text) + text)
    return keyed.hexdigest()
