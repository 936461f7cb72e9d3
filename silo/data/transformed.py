"""Applies the plan's transform, once, to all private pictures that a scan accepts.

A picture that the scan does not accept is left out, by the site's own rules. A picture that the plan's transform does
not take becomes blank samples and stays: the aggregator chooses what a plan takes, and must not learn from a number or
a refusal which pictures there are.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddm.errors import DataError
from ddm.images.patients import keyed
from ddm.images.record import MAX_CAPTION
from ddm.images.store import Item, StoredCohort, find_cohort, store_cohort
from ddm.images.transform import Transform
from ddm.io.files import replacing
from ddm.protocol.classes import Classes
from ddm.system.progress import ProgressCallback
from silo.data.problems import refuse_all
from silo.images.scan import ColumnOfPicture, QuarantineFile, ScannedImages
from silo.images.scanned_image import ScannedImage
from silo.images.source import ImageSource

LEFT_OUT = "left-out.csv"
BLANK = "blank"
NOT_TAKEN = f"{BLANK}: not taken by the plan"
_MAX_NAMED_CLASSES = 8  # in one message
_MAX_REASONS = 8
_PATIENTS_REMEDY = (
    "Give every image its patient, in a column patient of the images' table or an array patients; an image without one "
    "could belong to a patient who is counted already. Or leave its row out."
)
_LABELS_REMEDY = (
    "Give every image its class, in a column label of the images' table; or leave its row out."
)
_CLASSES_REMEDY = (
    "Write the classes by name, or by number as data.classes in policy.toml, else the plan, "
    "counts them; `silo scan SITE` counts the labels of this site."
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequiredColumns:
    """What a plan needs to know about each picture.

    Attributes:
        patients: whether it needs patients.
        classes: by which the site labels its pictures, if the plan needs classes; a label is stored as their number.
        captions: whether it needs texts.
    """

    patients: bool = False
    classes: Classes | None = None
    captions: bool = False

    @property
    def names(self) -> tuple[ColumnOfPicture, ...]:
        """The names of the columns."""
        names: list[ColumnOfPicture] = []
        if self.patients:
            names.append("patient")
        if self.classes is not None:
            names.append("label")
        if self.captions:
            names.append("caption")
        return tuple(names)


def open_transformed(
    source: ImageSource,
    transform: Transform,
    required: RequiredColumns,
    folder: Path,
    advance: ProgressCallback = lambda done, num: None,
) -> StoredCohort:
    """Return what the plan's transform makes of a site's pictures, from a copy in `folder` that is made once.

    Each accepted picture becomes `transform.num` samples, blank ones if the plan does not take it. `LEFT_OUT` in the
    private folder of the scans lists these pictures and the ones that are not accepted.

    Args:
        source: the site's images, with the key of the order of patients if patients are required.
        transform: the plan's.
        required: what the plan needs to know about each picture.
        folder: private to the worker.
        advance: called with pictures finished and in all, while they are decoded; with files finished and 0, while
            they are scanned.

    Raises:
        MissingFileError: nothing at the path.
        DataError: no picture that can be used; pictures without what the plan needs to know; or files that change
            meanwhile.
        SetupError: the decoders of these pictures are not installed.
        BusyError: another scan is at work.
        DiskError: too little space.
    """
    with ScannedImages.opened(source) as images:
        # Under the lock of scans: another scan could change which pictures are accepted before they are decoded here.
        images.update(lambda num_files: advance(num_files, 0), retry=False)
        inputs = _inputs(images, required)
        stored = find_cohort(folder, inputs, transform)
        if stored is not None:
            return stored
        # The list has names of files: for this site alone, and only whole if all pictures were transformed.
        with replacing(source.folder / LEFT_OUT, mode=0o600) as handle:
            left_out = QuarantineFile(handle)
            builder = _CohortBuilder(images, required, transform, left_out, advance)
            num_pictures = builder.check()
            _log.info("transforming %d images, once for this plan", num_pictures)
            stored = store_cohort(
                folder,
                inputs,
                transform,
                builder.items(num_pictures),
                max_images=num_pictures * transform.num,
                captions=required.captions,
            )
            left_out.close()
        _log.info("%d samples of %d images%s", len(stored), num_pictures, builder.reasons_text)
        if builder.num_blank:
            _log.warning(
                "%d of %d images are blank to this plan; %s says why",
                builder.num_blank,
                num_pictures,
                LEFT_OUT,
            )
        return stored


def _inputs(images: ScannedImages, required: RequiredColumns) -> list[object]:
    """Return all that the copy depends on besides the transform."""
    classes = None
    # The order of the names counts too, since the copy stores labels as numbers.
    if required.classes is not None:
        classes = [required.classes.num, required.classes.names]
    inputs: list[object] = [images.digest(required.names), required.names, classes]
    if required.patients:
        # The copy holds digests under the key of the order, and is not a use under another key; this digest identifies
        # the key without revealing it.
        inputs.append(keyed(b"cohort", "", images.source.order_key))
    return inputs


@dataclass
class _MissingValues:
    """How many accepted pictures lack what the plan needs.

    Attributes:
        patients: pictures without a patient.
        labels: pictures without a label.
        unknown_labels: pictures with a label that is not a class.
        long_captions: pictures whose caption is too long.
        has_caption: whether any picture has a caption: one is enough, the others are blank.
    """

    patients: int = 0
    labels: int = 0
    unknown_labels: int = 0
    long_captions: int = 0
    has_caption: bool = False


@dataclass
class _CohortBuilder:
    """Makes one copy.

    Attributes:
        left_out: the list of pictures that are left out or blank.
        reasons: why pictures are left out.
        num_blank: pictures that the plan does not take.
    """

    images: ScannedImages
    required: RequiredColumns
    transform: Transform
    left_out: QuarantineFile
    advance: ProgressCallback
    reasons: Counter[str] = field(default_factory=Counter)
    num_blank: int = 0

    def check(self) -> int:
        """Count the accepted pictures before any is decoded, and list the others.

        Raises:
            DataError: there are none, or what the plan needs is not known of all of them; everything that is missing.
        """
        num = 0
        missing = _MissingValues()
        for image in self.images:
            if image.reason is not None:
                self.reasons[image.reason] += 1
                self.left_out.add(image, image.reason, image.detail)
                continue
            num += 1
            self._count_missing(image, missing)
        if not num:
            got = "no files at all"
            if self.reasons:
                got = f"none{self.reasons_text}"
            raise DataError(
                "images",
                expected="at least one that can be used",
                got=got,
                remedy="See what is wrong with each file, and correct it: `silo scan SITE`.",
            )
        refuse_all(list(self._problems(num, missing)))
        return num

    def _count_missing(self, image: ScannedImage, missing: _MissingValues) -> None:
        required = self.required
        if required.patients and self.images.patient(image) is None:
            missing.patients += 1
        if required.classes is not None:
            if not image.label:
                missing.labels += 1
            elif required.classes.number(image.label) is None:
                missing.unknown_labels += 1
        if required.captions:
            caption = image.caption or ""
            if len(caption) > MAX_CAPTION:
                missing.long_captions += 1
            if caption.strip():
                missing.has_caption = True

    def items(self, num: int) -> Iterator[Item]:
        """Decode the accepted pictures, and yield the samples and columns of each."""
        for number, (image, picture) in enumerate(self.images.decoded()):
            self.advance(min(number, num), num)
            # Blank samples keep the number of images: a stop or another number would tell the aggregator something.
            if picture is None:
                samples = self.transform.blank
                self._note_blank(image, f"{BLANK}: {image.reason}", image.detail)
            else:
                samples, problem = self.transform.apply_to_any(picture)
                if problem is not None:
                    # The text is about sizes and values alone.
                    self._note_blank(image, NOT_TAKEN, problem)
            yield self._with_columns(image, Item(samples))

    def _with_columns(self, image: ScannedImage, item: Item) -> Item:
        """Add what the plan requires of an image beside its samples."""
        required = self.required
        if required.patients:
            patient = self.images.patient(image)
            order = self.images.order(image)
            item = replace(item, patient=patient, order=order)
        if required.classes is not None:
            label = required.classes.number(image.label or "")
            item = replace(item, label=label)
        if required.captions:
            item = replace(item, caption=image.caption or "")
        return item

    @property
    def reasons_text(self) -> str:
        """What was left out and why, without names; empty if nothing was."""
        if not self.reasons:
            return ""
        counts = [f"{num} {reason}" for reason, num in self.reasons.most_common(_MAX_REASONS)]
        return f"; left out: {', '.join(counts)}"

    def _note_blank(self, image: ScannedImage, reason: str, detail: str) -> None:
        self.num_blank += 1
        self.left_out.add(image, reason, detail)

    def _problems(self, num: int, missing: _MissingValues) -> Iterator[DataError]:
        """Yield what is missing; no cell of a table is quoted, since a cell may be about a patient."""
        if missing.patients:
            yield DataError(
                "patients",
                expected="a patient for each image",
                got=f"none for {missing.patients} of {num} images",
                remedy=_PATIENTS_REMEDY,
            )
        if missing.labels:
            yield DataError(
                "labels",
                expected="a label for each image",
                got=f"none for {missing.labels} of {num} images",
                remedy=_LABELS_REMEDY,
            )
        if missing.unknown_labels and self.required.classes is not None:
            yield DataError(
                "labels",
                expected=f"classes of the plan, {self.required.classes.words(_MAX_NAMED_CLASSES)}",
                got=f"others at {missing.unknown_labels} of {num} images",
                remedy=_CLASSES_REMEDY,
            )
        if missing.long_captions:
            yield DataError(
                "captions",
                expected=f"at most {MAX_CAPTION} characters each",
                got=f"longer ones at {missing.long_captions} of {num} images",
                remedy="Shorten these texts.",
            )
        if self.required.captions and not missing.has_caption:
            yield DataError(
                "captions",
                expected="a text for at least one image",
                got="blank ones alone",
                remedy="Put them into a column caption of the images' table.",
            )
