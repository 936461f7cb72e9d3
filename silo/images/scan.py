"""Scans a site's images: finds their files, decodes those that changed since the last scan, and judges every picture.

A scan has two passes. The first one brings the memory up to date: it decodes what is new or changed. The second one
reads the memory in the order of the files, and says about each picture whether it is accepted. Whether slices in files
of their own may show a face is known only after the first pass, when all slices of their scan were found.
"""

import csv
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO, TextIOWrapper
from typing import BinaryIO, Literal

from ddm.errors import DataError
from ddm.images.column_names import part_of
from ddm.images.find import ImageFile
from ddm.images.patients import order_of, pseudonyms
from ddm.images.picture import Picture
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.images.workers import DecodedImage, DecodeJob, DecoderOptions, decode_files
from ddm.io.files import replacing, write_atomic
from ddm.io.spreadsheet import quote_cell
from silo.images.decisions import Decisions
from silo.images.memory import PendingFile, RememberedFile, ScanMemory
from silo.images.scanned_image import ScannedImage
from silo.images.series import Stacks
from silo.images.source import ImageSource
from silo.images.summary import Summary

QUARANTINE = "quarantine.csv"
LOOK_ALIKES = "look-alikes.csv"
ColumnOfPicture = Literal["patient", "label", "caption"]
_log = logging.getLogger(__name__)


class ScannedImages:
    """The images of a site as scans know them. Use `ScannedImages.opened`.

    Files are looked up one by one, so that memory does not grow with their number.
    """

    def __init__(
        self,
        source: ImageSource,
        memory: ScanMemory,
        decisions: Decisions,
    ) -> None:
        self.source = source
        self.data = source.find()
        self.num_read = 0  # files whose content was read in the first pass
        self.num_decoded = 0  # of these, files that were decoded
        self._memory = memory
        self._decisions = decisions
        # For each file of the last second pass: whether a picture of it is accepted; a byte, for there may be millions.
        self._has_accepted = bytearray()

    @staticmethod
    @contextmanager
    def opened(source: ImageSource) -> "Iterator[ScannedImages]":
        """Open the memory of scans; one process at a time.

        Raises:
            BusyError: another scan is at work.
            SetupError: the memory or the decisions are damaged.
        """
        with (
            ScanMemory.opened(source.folder, source.recipe) as memory,
            Decisions.opened(source.folder) as decisions,
        ):
            yield ScannedImages(source, memory, decisions)

    def update(
        self,
        advance: Callable[[int], None] = lambda num_files: None,
        *,
        retry: bool,
    ) -> None:
        """Decode what is new or changed.

        Args:
            advance: called with the number of files that are finished.
            retry: whether to try files again whose failure may have been the machine's, such as a file that could not
                be read. The worker does not: a plan's images stay what they are until somebody scans again.

        Raises:
            MissingFileError, DataError: see `ddm.images.find.find_data`.
            SetupError: the decoders of these images are not installed.
        """
        # Jobs are taken ahead of the answers, so that several files are in work: the oldest is the one whose answer
        # comes next.
        in_work = deque[ImageFile]()
        num_found = 0

        def jobs() -> Iterator[DecodeJob]:
            nonlocal num_found
            for file in self.data.files():
                num_found += 1
                if file.reason is not None:
                    continue
                known_digest = ""
                remembered = self._memory.find(file)
                if remembered is not None:
                    is_retried = retry and remembered.may_pass
                    if remembered.unchanged and not is_retried:
                        self._memory.confirm(file, remembered)
                        continue
                    known_digest = remembered.digest
                self.num_read += 1
                in_work.append(file)
                yield DecodeJob(file.path, file.files, file.num_bytes, known_digest)

        pending: PendingFile | None = None
        for answer in decode_files(jobs(), self._decoder_options()):
            if pending is None:
                pending = PendingFile(self._memory, in_work[0])
            if isinstance(answer, DecodedImage):
                pending.add(answer.record)
                continue
            # The pictures of a file come before its own answer, and files are answered in the order of their jobs.
            file = in_work.popleft()
            remembered = None
            if answer.unchanged:
                remembered = self._memory.find(file)
            if remembered is not None:
                self._memory.confirm(file, remembered)
            else:
                self.num_decoded += 1
                reason = answer.reason
                if reason is None and not pending.num_pictures:
                    reason = Reason.NO_PIXELS
                pending.finish(answer.digest, reason, answer.detail)
            pending = None
            advance(num_found - len(in_work))
        advance(num_found)
        # Only at the end: a scan that is interrupted must not forget the files that it did not reach.
        self._memory.forget_others()
        self._judge_series()

    def _judge_series(self) -> None:
        """Find out which scans in files of their own may show a face, now that all of their slices are known."""
        stacks = Stacks()
        for record in self._memory.slices():
            stacks.add(record)
        self._decisions.judge(stacks.judged())

    def __iter__(self) -> Iterator[ScannedImage]:
        """Yield every picture, and every file that gives none, in the order of the files."""
        self._has_accepted = bytearray()
        for file, remembered in self._files():
            self._has_accepted.append(0)
            if remembered is None:
                reason = file.reason or Reason.CHANGED
                yield ScannedImage(file.path, file.row, reason=reason, detail=file.detail)
                continue
            for image in self._images_of(file, remembered):
                if image.reason is None:
                    self._has_accepted[-1] = 1
                yield image
            if remembered.reason is not None:
                yield ScannedImage(
                    file.path,
                    file.row,
                    reason=remembered.reason,
                    detail=remembered.detail,
                )

    def digest(self, columns: Collection[ColumnOfPicture]) -> str:
        """Return a digest of all that the accepted pictures depend on: files, cells of the table, and decisions.

        Args:
            columns: what is needed of each picture.

        Raises:
            DataError: files that changed since they were scanned.
        """
        inputs = f"{self.source.recipe} {self.source.parts} {self._decisions.digest}"
        digest = hashlib.sha256(inputs.encode())
        for file, remembered in self._files():
            names = ("split", *sorted(columns))
            cells = [getattr(file.row, name, None) for name in names]
            if remembered is not None:
                # A file whose content could not be read has no digest; its size and times stand in for it.
                content = (remembered.digest or file.stats, remembered.reason, cells)
            elif file.reason is not None:
                content = (file.reason, None, cells)
            else:
                raise changed_files()
            digest.update(repr(content).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def patient(self, image: ScannedImage) -> str | None:
        """Return the pseudonym of a picture's patient; None without one."""
        both = self.pseudonyms(image)
        if both is None:
            return None
        patient, _ = both
        return patient

    def pseudonyms(self, image: ScannedImage) -> tuple[str, str] | None:
        """Return the pseudonym of a picture's patient, and the one that similar spellings share.

        The table takes precedence over what the file says.
        """
        if image.row is not None:
            patient = image.row.patient
            named = pseudonyms(patient, self._memory.key, self.source.patient_rule)
            if named is not None:
                return named
        if image.record is None:
            return None
        return image.record.patient

    def order(self, image: ScannedImage) -> str | None:
        """Return the secret rank of a picture's patient, for a picture that was decoded with values; None without one.

        The rank follows from the identifier: other files, another order of them or new scans do not change it. If a
        file that names a patient can no longer be read, the rank follows from the pseudonym of this scan.
        """
        order_key = self.source.order_key
        rank = None
        if image.row is not None:
            patient = image.row.patient
            rank = order_of(patient, order_key, self.source.patient_rule)
        return rank or image.order or order_of(self.patient(image), order_key)

    def decoded(self) -> Iterator[tuple[ScannedImage, Picture | None]]:
        """Decode files again, and yield their accepted pictures with their values, in the order of the files.

        As many pictures come as the last second pass accepted: a picture that the file no longer gives comes without
        values, with the reason. Files without an accepted picture are not opened.

        Raises:
            DataError: files that changed since they were scanned.
        """
        in_work = deque[tuple[ImageFile, RememberedFile]]()

        def jobs() -> Iterator[DecodeJob]:
            for number, (file, remembered) in enumerate(self._files()):
                # More files than the last second pass saw: it is not known which of their pictures were accepted.
                if number >= len(self._has_accepted):
                    raise changed_files()
                if remembered is not None and self._has_accepted[number]:
                    in_work.append((file, remembered))
                    yield DecodeJob(file.path, file.files, file.num_bytes)

        images: Iterator[ScannedImage] | None = None  # of the file in hand, as the scan knows them
        options = self._decoder_options(with_values=True)
        for answer in decode_files(jobs(), options):
            if images is None:
                file, remembered = in_work[0]
                images = self._images_of(file, remembered)
            if isinstance(answer, DecodedImage):
                image = next(images, None)
                if image is not None and image.reason is None:
                    # A person may have looked at these pixels: other ones are not used in their place, even if they
                    # come from a file beside this one, such as an image that a Parquet table names.
                    if image.record is None or answer.record.pixels != image.record.pixels:
                        raise changed_files()
                    yield replace(image, order=answer.order), answer.picture
                continue
            # The answer that ends a file.
            _, remembered = in_work.popleft()
            has_both_digests = answer.digest and remembered.digest
            if has_both_digests and answer.digest != remembered.digest:
                raise changed_files()
            # Pictures that the scan accepted and the file no longer gives: their number must not change.
            reason = answer.reason or Reason.NO_PIXELS
            for image in images:
                if image.reason is None:
                    yield replace(image, reason=reason, detail=answer.detail), None
            images = None

    def _decoder_options(self, *, with_values: bool = False) -> DecoderOptions:
        return DecoderOptions(
            self.source.limits,
            self._memory.key,
            self.source.num_processes,
            with_values=with_values,
            order_key=self.source.order_key if with_values else b"",
            patient_rule=self.source.patient_rule,
        )

    def _files(self) -> Iterator[tuple[ImageFile, RememberedFile | None]]:
        """Yield each file with what is remembered of it: None if it is not read, or came after the first pass."""
        for file in self.data.files():
            remembered = None
            if file.reason is None:
                remembered = self._memory.find(file)
            yield file, remembered

    def _images_of(self, file: ImageFile, remembered: RememberedFile) -> Iterator[ScannedImage]:
        for place, record in enumerate(self._memory.pictures(remembered.number)):
            yield self._judged(file, place, record)

    def _judged(
        self,
        file: ImageFile,
        place: int,
        record: PictureRecord,
    ) -> ScannedImage:
        """Return a picture with the reason why it is not accepted, if there is one."""
        record = self._decisions.flagged(record)
        split = record.split
        # The table takes precedence over what the file says, as it does for patients.
        if file.row is not None and file.row.split:
            split = file.row.split
        part = part_of(split)
        image = ScannedImage(file.path, file.row, place, record, part=part)
        reason = self._decisions.verdict(record)
        if reason is None:
            if self.source.uses(part):
                return image
            return replace(image, reason=Reason.OTHER_PART)
        detail = record.detail
        # A single flag is the reason itself.
        reason_says_all = reason == record.verdict and len(record.flags) <= 1
        if not detail and not reason_says_all:
            detail = ", ".join(record.flags)
        return replace(image, reason=reason, detail=detail)


def scan(
    source: ImageSource,
    advance: Callable[[int], None] = lambda num_files: None,
    observe: Callable[[ScannedImage], None] = lambda image: None,
) -> Summary:
    """Scan images, and write the list of those that are not accepted into the private folder.

    Args:
        source: the images.
        advance: called with the number of files that are finished.
        observe: called with each picture, and with each file that gives none.

    Raises:
        MissingFileError, DataError: see `ddm.images.find.find_data`.
        BusyError: another scan is at work.
        SetupError: the decoders of these images are not installed.
    """
    summary = Summary()
    with ScannedImages.opened(source) as images:
        images.update(advance, retry=True)
        with replacing(source.folder / QUARANTINE, mode=0o600) as handle:
            quarantine = QuarantineFile(handle)
            for image in images:
                summary.add(image, images.pseudonyms(image))
                if image.reason is not None:
                    quarantine.add(image, image.reason, image.detail)
                observe(image)
            quarantine.close()
        _write_look_alikes(source, summary)
        summary.table_remarks = images.data.remarks()
        if source.declared_range is not None:
            summary.declared_range = source.declared_range
    summary.num_read = images.num_read
    summary.num_decoded = images.num_decoded
    return summary


def _write_look_alikes(source: ImageSource, summary: Summary) -> None:
    """List the patients whose identifiers look alike, each with a file: a person decides whether they are the same."""
    path = source.folder / LOOK_ALIKES
    groups = summary.look_alikes()
    if not groups:
        path.unlink(missing_ok=True)
        return
    text = StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(("group", "patient", "first file"))
    for number, group in enumerate(groups, 1):
        for patient, image in group:
            # A file's own identifier stays in its decoder: its pseudonym is listed instead.
            identifier = patient
            if image.row is not None and image.row.patient:
                identifier = image.row.patient
            rows.writerow((number, quote_cell(identifier), quote_cell(image.path)))
    # Names of files may hold any bytes.
    content = text.getvalue().encode("utf-8", "surrogateescape")
    write_atomic(path, content, mode=0o600)


class QuarantineFile:
    """A CSV of images that are left out, with the names of their files: for this site alone."""

    def __init__(self, handle: BinaryIO) -> None:
        self._text = TextIOWrapper(handle, encoding="utf-8", errors="surrogateescape", newline="")
        self._rows = csv.writer(self._text)
        self._rows.writerow(("path", "image", "reason", "detail"))

    def add(
        self,
        image: ScannedImage,
        reason: str,
        detail: str,
    ) -> None:
        """Add a picture, or a file that gives none."""
        # None is written as an empty cell.
        path_cell = quote_cell(image.path)
        detail_cell = quote_cell(detail)
        self._rows.writerow((path_cell, image.place, reason, detail_cell))

    def close(self) -> None:
        """Write the rest; the file stays open."""
        self._text.flush()
        # The handle is still synced and renamed by its owner, so that the wrapper must not close it.
        self._text.detach()


def changed_files() -> DataError:
    """Return the error for files that changed while they were read."""
    return DataError(
        "data",
        expected="files that do not change while they are read",
        got="new or changed files",
        remedy="Wait until no program writes there, then run the command again.",
    )
