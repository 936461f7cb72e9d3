"""Encodes this site's captions once, with the encoder that the plan pins, into vectors kept in `private/`.

The file is named by a digest of its inputs, as with latents, and is read through the page cache. Padding is a hole in
the file, so it takes no disk space. The vectors are as private as the captions: with a public encoder, a text can be
guessed from its vectors.
"""

import logging
import math
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ddm.errors import DataError, SetupError
from ddm.io.files import move_into_place, write_atomic
from ddm.protocol.architecture import TextCondition
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Plan
from ddm.system.progress import ProgressCallback
from silo.config import SiloSettings
from silo.data.cohort import Cohort

_PREFIX = "texts-"
_TEXTS_BETWEEN_SAVES = 1024  # of the progress
_FLOAT_BYTES = 4
_log = logging.getLogger(__name__)
_RESTORE_REMEDY = "Restore private/ from backup, or give the plan up: `silo withdraw SITE`."


def check_encoder(plan: Plan, settings: SiloSettings) -> None:
    """Refuse, before anything is encoded, a plan whose text encoder is not on this site.

    Raises:
        SetupError: the plan pins no encoder, or silo.toml names no folder.
        MissingFileError, DigestError: the folder lacks a pinned file, or holds it with different bytes.
    """
    if isinstance(plan.condition, TextCondition):
        # This import takes seconds, and most plans have no texts.
        from ddm.encoders.text import check_files, pinned_of

        check_files(_encoder_folder(plan.condition, settings), pinned_of(plan.condition))


def keep_texts(
    cohort: Cohort, plan: Plan, settings: SiloSettings, folder: Path, on_progress: ProgressCallback
) -> None:
    """Encode every caption into a file in `folder`, unless it exists already; vectors of other plans are removed.

    Args:
        cohort: the captions.
        plan: the accepted plan.
        settings: this site's, with the encoder's folder.
        folder: private to the worker.
        on_progress: called with texts encoded and texts in all; an exception it raises stops the work, and the next
            call continues from there.

    Raises:
        SetupError, MissingFileError, DigestError: see `ddm.encoders.text.TextEncoder.open`.
        OSError: the disk is full.
    """
    path = _path(cohort, plan, folder)
    for other in folder.glob(f"{_PREFIX}*"):
        # The parts of an interrupted run have the same stem as the file that they become.
        if path is None or other.stem != path.stem:
            other.unlink()
    if path is None or path.exists() or not isinstance(plan.condition, TextCondition):
        return
    from ddm.encoders.text import BLOCK, TextEncoder

    # Opened before the file is made: a wrong folder must leave nothing behind.
    encoder = TextEncoder.open(_encoder_folder(plan.condition, settings), plan.condition)
    captions = cohort.captions or ()
    part_path = path.with_suffix(".part")
    progress_path = path.with_suffix(".done")
    shape = _shape(cohort, plan.condition)
    array_start, num_encoded = _continue_or_begin(part_path, progress_path, shape)
    with part_path.open("r+b") as handle:
        try:
            for first in range(num_encoded, len(captions), BLOCK):
                block = captions[first : first + BLOCK]
                vectors = encoder.encode(block, replacement=0.0)
                _write_rows(handle, vectors, array_start, first)
                num_encoded = first + len(vectors)
                if num_encoded % _TEXTS_BETWEEN_SAVES == 0:
                    _save_progress(handle, progress_path, num_encoded)
                on_progress(num_encoded, len(captions))
        finally:
            _save_progress(handle, progress_path, num_encoded)
    # A crash between the two does no harm: a file of the final name is complete.
    move_into_place(part_path, path)
    progress_path.unlink()
    num_cut = encoder.num_cut(captions)
    if num_cut:
        _log.warning("Captions cut to %d tokens: %d", plan.condition.max_tokens, num_cut)


def texts_of(cohort: Cohort, plan: Plan, folder: Path) -> Tensor | None:
    """Return the text condition of each image, shape (N, L, D); None for a plan without texts.

    Raises:
        DataError: the vectors of these captions are missing, or have a different shape or dtype.
    """
    path = _path(cohort, plan, folder)
    if path is None or not isinstance(plan.condition, TextCondition):
        return None
    shape = _shape(cohort, plan.condition)
    subject = "vectors of the captions"
    try:
        # Copy on write: torch wants writable memory, and the file must stay as it is.
        vectors = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        got = "a file that is not a readable array"
        if isinstance(error, FileNotFoundError):
            got = "no file"
        raise DataError(
            subject, expected="those encoded for this plan", got=got, remedy=_RESTORE_REMEDY
        ) from error
    if vectors.shape != shape or vectors.dtype != np.float32:
        got = f"{vectors.dtype} {vectors.shape}"
        raise DataError(subject, expected=f"float32 {shape}", got=got, remedy=_RESTORE_REMEDY)
    return torch.from_numpy(vectors)


def some_texts(text_NLD: Tensor, chosen: Tensor, folder: Path) -> Tensor:
    """Return the vectors of the chosen images, mapped from a temporary file without a name, not held in memory.

    Raises:
        OSError: the disk is full.
    """
    shape = (len(chosen), *text_NLD.shape[1:])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as handle:
        for row, number in enumerate(chosen.tolist()):
            text_1LD = text_NLD[number : number + 1]
            _write_rows(handle, text_1LD, array_start=0, first=row)
        # The padding of the last text was not written, see `_write_rows`.
        num_bytes = _FLOAT_BYTES * math.prod(shape)
        handle.truncate(num_bytes)
        # Copy on write: torch wants writable memory. The mapping keeps the file, which has no name, until it goes.
        vectors = np.memmap(handle, np.float32, mode="c", shape=shape)
        return torch.from_numpy(vectors)


def _write_rows(handle: BinaryIO, text_BLD: Tensor, array_start: int, first: int) -> None:
    """Write vectors from row `first` of the array that starts at byte `array_start`; padding stays a hole in the file.

    Written, not mapped: a full disk kills a process that writes into a mapped file with a signal instead of an error.
    """
    for row, vectors in enumerate(text_BLD.numpy(), first):
        row_start = array_start + row * vectors.nbytes
        handle.seek(row_start)
        without_padding = vectors.tobytes().rstrip(b"\0")
        handle.write(without_padding)


def _continue_or_begin(
    part_path: Path, progress_path: Path, shape: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the byte at which the array starts and the rows already encoded; start over if nothing usable exists."""
    try:
        num_encoded = int(progress_path.read_bytes())
        vectors = np.lib.format.open_memmap(part_path, mode="r")
        is_same_array = vectors.shape == shape and vectors.dtype == np.float32
        if is_same_array and 0 <= num_encoded <= len(vectors):
            return vectors.offset, num_encoded
    except (OSError, ValueError):
        pass  # nothing that can be continued
    # Before the new array, or an old progress would count rows that are empty.
    progress_path.unlink(missing_ok=True)
    vectors = np.lib.format.open_memmap(part_path, mode="w+", dtype=np.float32, shape=shape)
    return vectors.offset, 0


def _save_progress(handle: BinaryIO, progress_path: Path, num_encoded: int) -> None:
    """Record the progress once the rows it counts are on disk."""
    handle.flush()
    os.fsync(handle.fileno())
    write_atomic(progress_path, str(num_encoded).encode())


def _shape(cohort: Cohort, condition: TextCondition) -> tuple[int, int, int]:
    return len(cohort.images), condition.max_tokens, condition.dim


def _path(cohort: Cohort, plan: Plan, folder: Path) -> Path | None:
    """Return the path of the vectors, None for a plan without texts; the cohort's digest covers its captions."""
    if not isinstance(plan.condition, TextCondition):
        return None
    # Not `drop`, which only concerns training.
    condition = plan.condition.model_dump_json(exclude={"drop"})
    digest = sha256_hex(f"{cohort.digest} {condition}".encode())
    return folder / f"{_PREFIX}{digest[:32]}.npy"


def _encoder_folder(condition: TextCondition, settings: SiloSettings) -> Path:
    if settings.text is not None:
        return Path(settings.text.encoder)
    name = "text encoder"
    if condition.encoder is not None:
        name = condition.encoder.name
    raise SetupError(
        "text encoder",
        expected="its folder in silo.toml",
        got="no section [text]",
        remedy=f"Bring the folder of {name} to this machine and name it in silo.toml: [text] encoder = FOLDER.",
    )
