"""Supplies the experts' training inputs: the images, or latents encoded once and kept in `private/`.

Latents lie in a file that is read through the page cache: encoding needs memory for one block, training for what it
reads. The file is named by a digest of its inputs, so other images or another autoencoder never find it.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ddm.encoders import Progress
from ddm.encoders.autoencoder import AutoencoderKl, Latent
from ddm.errors import DataError
from ddm.io.files import replacing
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Autoencoder, Plan
from silo.data.captions import texts_of
from silo.data.cohort import Cohort

_PREFIX = "latents-"
_GIVE_UP = "Restore private/ from backup, or give the plan up: silo withdraw."


def keep_latents(cohort: Cohort, latent: Latent, plan: Plan, folder: Path, on_progress: Progress) -> None:
    """Encode every image into a file in `folder`, unless it exists already; latents of other plans are removed.

    Args:
        cohort: the images, in pixels.
        latent: the plan's.
        plan: the accepted plan.
        folder: private to the worker.
        on_progress: called with images encoded and images in all; an exception it raises stops the work, and the next
            call starts over.

    Raises:
        NumericalError: the autoencoder gave values that are not finite.
        OSError: the disk is full.
    """
    path = _path(cohort, plan, folder)
    for other in (*folder.glob(f"{_PREFIX}*"), *folder.glob(f".{_PREFIX}*.part")):
        if other != path:
            other.unlink()
    if path is None or path.exists() or not isinstance(latent, AutoencoderKl):
        return
    shape = (len(cohort.images), *plan.expert_shape)
    with replacing(path) as handle:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(handle, header)
        begin, size = handle.tell(), 4 * math.prod(shape)
        handle.truncate(begin + size)
        if hasattr(os, "posix_fallocate"):  # a full disk is deadly to a process that writes into a mapped file
            os.posix_fallocate(handle.fileno(), begin, size)
        kept = np.memmap(handle, np.dtype("<f4"), "r+", begin, shape)
        latent.encode_into(cohort.images, torch.from_numpy(kept), on_progress)
        kept.flush()


def training_inputs(cohort: Cohort, plan: Plan, folder: Path) -> Cohort:
    """Return the cohort as experts are trained on it: latents in place of images, captions as vectors, as planned.

    Its digest stays that of the pixels and captions.

    Raises:
        DataError: the latents of these images, or the vectors of these captions, are missing or do not fit the plan.
    """
    cohort = replace(cohort, text_NLD=texts_of(cohort, plan, folder))
    path = _path(cohort, plan, folder)
    if path is None:
        return cohort
    shape = (len(cohort.images), *plan.expert_shape)
    try:
        kept = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        got = "no file" if isinstance(error, FileNotFoundError) else "a file that is not a readable array"
        raise DataError("latents", expected="those encoded for this plan", got=got, remedy=_GIVE_UP) from error
    if (kept.shape, kept.dtype) != (shape, np.float32):
        got = f"{kept.dtype} {kept.shape}"
        raise DataError("latents", expected=f"float32 {shape}", got=got, remedy=_GIVE_UP)
    return replace(cohort, images=torch.from_numpy(kept))


def _path(cohort: Cohort, plan: Plan, folder: Path) -> Path | None:
    """Return the path of the latents, None for a plan whose experts are trained on the images."""
    latent = plan.latent
    if not isinstance(latent, Autoencoder):
        return None
    inputs = f"{cohort.digest} {plan.file(latent.path).digest} {latent.model_dump_json()}"
    return folder / f"{_PREFIX}{sha256_hex(inputs.encode())[:32]}.npy"
