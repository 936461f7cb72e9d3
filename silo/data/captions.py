"""What experts are told of this site's captions: vectors, made once by the encoder that the plan pins, in `private/`.

They lie in a file named by what they were made of, as latents do, and are read through the page cache. Where a text
ends, a hole begins in the file, so that padding takes no disk. As private as the captions: from the vectors of an
encoder that everybody has, a text can be guessed back.
"""

import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ddm.encoders import Progress
from ddm.errors import DataError, SetupError
from ddm.io.files import move_into_place, write_atomic
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Plan, TextCondition
from ddm.system.console import say
from silo.config import SiloSettings
from silo.data.cohort import Cohort

_PREFIX = "texts-"
_SAVED_TEXTS = 1024  # encoded between two notes of how far it is
_GIVE_UP = "Restore private/ from backup, or give the plan up: silo withdraw."


def check_encoder(plan: Plan, settings: SiloSettings) -> None:
    """Refuse, before anything is encoded, a plan whose text encoder is not on this site.

    Raises:
        SetupError: the plan pins none, or silo.toml names none.
        MissingFileError, DigestError: the folder named holds others.
    """
    if isinstance(plan.condition, TextCondition):
        from ddm.encoders.text import check_files, pinned_of  # takes seconds, and most plans do without

        check_files(_encoder_folder(plan.condition, settings), pinned_of(plan.condition))


def keep_texts(cohort: Cohort, plan: Plan, settings: SiloSettings, folder: Path, on_progress: Progress) -> None:
    """Encode every caption into a file in `folder`, unless that is there already; those of other plans are removed.

    Args:
        cohort: the captions.
        plan: the accepted plan.
        settings: name the encoder's folder.
        folder: private to the worker.
        on_progress: called with texts encoded and texts in all; what it raises ends the work, which goes on from there.

    Raises:
        SetupError, MissingFileError, DigestError: see `ddm.encoders.text.TextEncoder.open`.
        NumericalError: vectors that are not finite.
        OSError: the disk is full.
    """
    path = _path(cohort, plan, folder)
    for other in folder.glob(f"{_PREFIX}*"):
        if path is None or other.stem != path.stem:
            other.unlink()
    if path is None or path.exists() or not isinstance(plan.condition, TextCondition):
        return
    from ddm.encoders.text import BLOCK, TextEncoder

    encoder = TextEncoder.open(_encoder_folder(plan.condition, settings), plan.condition)
    captions, part, note = cohort.captions or (), path.with_suffix(".part"), path.with_suffix(".done")
    begin, done = _begun(part, note, _shape(cohort, plan.condition))
    with part.open("r+b") as handle:
        try:
            for first in range(done, len(captions), BLOCK):
                vectors = encoder.encode(captions[first : first + BLOCK])
                _write_rows(handle, vectors, begin, first)
                done = first + len(vectors)
                if done % _SAVED_TEXTS == 0:
                    _save(handle, note, done)
                on_progress(done, len(captions))
        finally:
            _save(handle, note, done)
    move_into_place(part, path)
    note.unlink()
    if cut := encoder.num_cut(captions):
        say(f"Captions longer than {plan.condition.max_tokens} tokens, whose rest is not learned: {cut}")


def texts_of(cohort: Cohort, plan: Plan, folder: Path) -> Tensor | None:
    """Return what experts are told of each image, shape (N, L, D); None where the plan tells no texts.

    Raises:
        DataError: the vectors of these captions are not there, or are others.
    """
    path = _path(cohort, plan, folder)
    if path is None or not isinstance(plan.condition, TextCondition):
        return None
    shape = _shape(cohort, plan.condition)
    try:
        kept = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError("captions", expected="this plan's vectors of them", got="none", remedy=_GIVE_UP) from error
    if kept.shape != shape or kept.dtype != np.float32:
        raise DataError("captions", expected=f"float32 {shape}", got="another array", remedy=_GIVE_UP)
    return torch.from_numpy(kept)


def some_texts(text_NLD: Tensor, chosen: Tensor, folder: Path) -> Tensor:
    """Return the vectors of some images, read from a file that has no name and ends with them, not held in memory.

    Raises:
        OSError: the disk is full.
    """
    shape = (len(chosen), *text_NLD.shape[1:])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as handle:
        for row, number in enumerate(chosen.tolist()):
            _write_rows(handle, text_NLD[number : number + 1], 0, row)
        handle.truncate(4 * torch.Size(shape).numel())
        return torch.from_numpy(np.memmap(handle, np.float32, mode="c", shape=shape))


def _write_rows(handle: BinaryIO, text_BLD: Tensor, begin: int, first: int) -> None:
    """Write vectors where row `first` of an array lies that begins at `begin`, and leave a hole for padding.

    Written, not mapped: to a process that writes into a mapped file, a full disk is a deadly signal, and no error.
    """
    for row, vectors in enumerate(text_BLD.numpy(), first):
        handle.seek(begin + row * vectors.nbytes)
        handle.write(vectors.tobytes().rstrip(b"\0"))


def _begun(part: Path, note: Path, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return where in its file the array begins, and how many are there; from the beginning where nothing fits."""
    try:
        done, kept = int(note.read_bytes()), np.lib.format.open_memmap(part, mode="r")
        if kept.shape == shape and kept.dtype == np.float32 and 0 <= done <= len(kept):
            return kept.offset, done
    except (OSError, ValueError):
        pass
    note.unlink(missing_ok=True)
    return np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape).offset, 0


def _save(handle: BinaryIO, note: Path, done: int) -> None:
    """Note how far it is, after what was made until then is on disk."""
    handle.flush()
    os.fsync(handle.fileno())
    write_atomic(note, str(done).encode())


def _shape(cohort: Cohort, condition: TextCondition) -> tuple[int, int, int]:
    return len(cohort.images), condition.max_tokens, condition.dim


def _path(cohort: Cohort, plan: Plan, folder: Path) -> Path | None:
    """Return where the vectors lie; the cohort's digest covers its captions. None where the plan tells no texts."""
    if not isinstance(plan.condition, TextCondition):
        return None
    made_of = f"{cohort.digest} {plan.condition.model_dump_json(exclude={'drop'})}"
    return folder / f"{_PREFIX}{sha256_hex(made_of.encode())[:32]}.npy"


def _encoder_folder(condition: TextCondition, settings: SiloSettings) -> Path:
    if settings.text is None:
        name = condition.encoder.name if condition.encoder else "text encoder"
        remedy = f"Bring the folder of {name} to this machine and name it in silo.toml: [text] encoder = FOLDER."
        raise SetupError("text encoder", expected="its folder in silo.toml", got="none", remedy=remedy)
    return Path(settings.text.encoder)
