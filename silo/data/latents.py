"""The experts' training inputs: the images, or their latents.

Latents are brought by the site, or encoded once and kept in `private/`. Encoding needs memory for one block of latents,
and training for what it reads. The file that keeps them is named by a digest of its inputs, so that it is never used
for other images or another autoencoder.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from ddm.encoders.autoencoder import AutoencoderKl, Latent
from ddm.errors import DataError, MissingFileError
from ddm.images.fit import as_floats
from ddm.images.npz import open_npy
from ddm.images.rows import (
    DerivedImages,
    FileArray,
    Images,
    ScaledImages,
    StoredImages,
    blocks,
    write_rows,
)
from ddm.io.files import replacing
from ddm.protocol.base import sha256_hex
from ddm.protocol.latent import Autoencoder, AutoencoderKlLatent, DiffusersKlLatent
from ddm.protocol.plan import Plan
from ddm.system.progress import ProgressCallback
from silo.data.captions import texts_of
from silo.data.cohort import Cohort

_PREFIX = "latents-"
_BLOCKS_IN_MEMORY = 16  # of the autoencoder's, before they are written
_RESTORE_REMEDY = "Restore private/ from backup, or give the plan up: `silo withdraw SITE`."


def keep_latents(
    cohort: Cohort, latent: Latent, plan: Plan, folder: Path, on_progress: ProgressCallback
) -> None:
    """Encode every image into a file in `folder`, unless it exists already; latents of other plans are removed.

    Args:
        cohort: the images, in pixels; of latents that the site brings nothing is kept.
        latent: the plan's.
        plan: the accepted plan.
        folder: private to the worker.
        on_progress: called with images encoded and images in all; an exception it raises stops the work, and the next
            call starts over.

    Raises:
        OSError: the disk is full.
    """
    path = _path(cohort, plan, folder)
    finished = folder.glob(f"{_PREFIX}*")
    unfinished = folder.glob(f".{_PREFIX}*.part")
    # A site works on one plan at a time, and latents of an earlier one would stay as large private files without a
    # use.
    for other in (*finished, *unfinished):
        if other != path:
            other.unlink()
    if path is None or path.exists() or not isinstance(latent, AutoencoderKl):
        return
    shape = (len(cohort.images), *plan.expert_shape)
    with replacing(path) as handle:
        latent_blocks = _encode(cohort.images, _for_privacy(plan, latent), on_progress)
        write_rows(handle, shape, np.dtype("<f4"), latent_blocks)


def _for_privacy(plan: Plan, latent: AutoencoderKl) -> AutoencoderKl:
    """Return what encodes each image alone if training is private, or sketches of latents leave the silo.

    In a block, images change each other's rounding, so that one image would have an influence on the latents of others,
    which the accounting of privacy does not cover.
    """
    if plan.expert.privacy or plan.statistics.sketch:
        return latent.for_single_samples()
    return latent


def _encode(
    images: Images, latent: AutoencoderKl, on_progress: ProgressCallback
) -> Iterator[Tensor]:
    """Yield latents in blocks of a multiple of the autoencoder's own, which have the same values as one by one."""
    for start, block in blocks(images, size=_BLOCKS_IN_MEMORY * latent.block):
        yield latent.encode(block, replacement=0.0)
        on_progress(start + len(block), len(images))


def pixels_of(cohort: Cohort, latent: Latent, plan: Plan) -> Images:
    """Return the images that features are made of: of latents that the site brings, what the autoencoder decodes."""
    if not cohort.latent:
        return cohort.images
    low, high = plan.data.range
    if isinstance(latent, AutoencoderKl):
        # Features, from which statistics are counted, are made of these.
        latent = latent.for_single_samples()

    def decode(z_B: Tensor) -> Tensor:
        return latent.decode(z_B, replacement=0.0).clamp(low, high)

    # Decoded whenever they are read: the pixels of all latents may be larger than memory.
    return DerivedImages(_scaled(cohort.images, plan), decode, plan.data.shape)


def training_inputs(cohort: Cohort, plan: Plan, folder: Path) -> Cohort:
    """Return the cohort as experts are trained on it: latents in place of images, captions as vectors, as planned.

    Its digest stays that of what the site brings.

    Raises:
        DataError: the latents of these images, or the vectors of these captions, are missing or do not fit the plan.
    """
    cohort = replace(cohort, text_NLD=texts_of(cohort, plan, folder))
    # Latents that the site brings are scaled whenever they are read; those encoded here have been already.
    if cohort.latent:
        return replace(cohort, images=_scaled(cohort.images, plan))
    path = _path(cohort, plan, folder)
    if path is None:
        return cohort
    shape = (len(cohort.images), *plan.expert_shape)
    latents = _open_latents(path)
    # The name binds the file to its inputs, not its content to the name.
    if latents.shape != shape or latents.dtype != np.float32:
        got = f"{latents.dtype} {latents.shape}"
        raise DataError("latents", expected=f"float32 {shape}", got=got, remedy=_RESTORE_REMEDY)
    return replace(cohort, images=StoredImages(latents, as_floats, shape[1:]))


def _open_latents(path: Path) -> FileArray:
    try:
        return open_npy(path)
    except (MissingFileError, DataError, OSError) as error:
        got = "a file that is not a readable array"
        if isinstance(error, MissingFileError):
            got = "no file"
        raise DataError(
            "latents", expected="those encoded for this plan", got=got, remedy=_RESTORE_REMEDY
        ) from error


def _scaled(images: Images, plan: Plan) -> Images:
    """Return latents that the site brings, minus the plan's shift and divided by its scale."""
    shift = 0.0
    scale = 1.0
    match plan.latent:
        case AutoencoderKlLatent():
            scale = plan.latent.scale
        case DiffusersKlLatent():
            shift = plan.latent.shift_factor
            scale = 1 / plan.latent.scaling_factor
    return ScaledImages(images, shift, scale)


def _path(cohort: Cohort, plan: Plan, folder: Path) -> Path | None:
    """Return the path of the latents, None where experts are trained on what the site brings."""
    latent = plan.latent
    if cohort.latent or not isinstance(latent, Autoencoder):
        return None
    inputs = f"{cohort.digest} {plan.file(latent.path).digest} {latent.model_dump_json()}"
    return folder / f"{_PREFIX}{sha256_hex(inputs.encode())[:32]}.npy"
