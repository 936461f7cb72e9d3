"""The pairs and the images that an operator should look at, in the private folder: nothing of this ever leaves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ddm.audit.copies import Scale
from ddm.audit.membership import Membership
from ddm.errors import ArchipelagoError
from ddm.evaluation.copies import pixel_rows
from ddm.io.files import read_bounded, write_atomic
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.base import Document, ExpertId, NaturalInt
from silo.audit.parts import Parts
from silo.audit.subject import Subject

MOST_PAIRS, MOST_SUSPECTS = 12, 24
_MAX_BYTES, _MOST = 1 << 26, 1e30
Distance = Annotated[float, Field(ge=0.0, le=_MOST)]


class Worst(Document):
    """The samples nearest to images that an expert learned, and the images that attacks point at most.

    Attributes:
        pair_images: the number of each pair's image in the site's data, from 0.
        pair_distances: in pixels, over the distance at which held-out images usually lie.
        suspects: numbers of images of the units that attacks point at most, from 0.
        suspicion: of each, in standard deviations of the units held out.
    """

    format: Literal["archipelago/audit-worst/1"] = "archipelago/audit-worst/1"
    expert_id: ExpertId
    pair_images: Annotated[tuple[NaturalInt, ...], Field(max_length=MOST_PAIRS)]
    pair_distances: Annotated[tuple[Distance, ...], Field(max_length=MOST_PAIRS)]
    suspects: Annotated[tuple[NaturalInt, ...], Field(max_length=MOST_SUSPECTS)]
    suspicion: Annotated[
        tuple[Annotated[float, Field(ge=-_MOST, le=_MOST)], ...], Field(max_length=MOST_SUSPECTS)
    ]


def keep_worst(
    subject: Subject, parts: Parts, found: Membership, near: Mapping[str, Tensor], scale: Scale
) -> None:
    """Write the worst pairs, with thumbnails, and the images of the units that attacks point at most."""
    apart_S = near["pixels of samples"][:, 0].sqrt()
    worst = torch.argsort(apart_S, stable=True)[:MOST_PAIRS]
    image_P = subject.learned_N[near["pixels near samples"][worst]]
    order = torch.argsort(found.suspicion_M, descending=True)[:MOST_SUSPECTS]
    first_U = torch.searchsorted(subject.members.unit_I.contiguous(), order)
    document = Worst(
        expert_id=subject.expert_id,
        pair_images=tuple(image_P.tolist()),
        pair_distances=tuple(
            min(each, _MOST) for each in (apart_S[worst] / (3 * scale.floor or 1.0)).tolist()
        ),
        suspects=tuple(subject.members.image_I[first_U].tolist()),
        suspicion=tuple(
            max(min(each, _MOST), -_MOST) for each in found.suspicion_M[order].tolist()
        ),
    )
    write_atomic(worst_path(subject.folder), document.encode(), mode=0o600)
    samples = torch.stack([parts.thumbnail(int(number)) for number in worst])
    real = pixel_rows(torch.cat([subject.pixels[number[None]] for number in image_P]))
    save_tensors(
        pairs_path(subject.folder), {"samples": samples.contiguous(), "images": real.contiguous()}
    )


def worst_path(folder: Path) -> Path:
    """Return where an expert's worst findings lie."""
    return folder / "worst.json"


def pairs_path(folder: Path) -> Path:
    """Return where the thumbnails of its pairs lie: `samples` and `images`, as rows of values."""
    return folder / "pairs.safetensors"


def read_worst(folder: Path) -> tuple[Worst, Mapping[str, Tensor]] | None:
    """Read what `keep_worst` wrote; None where there is none that can be read."""
    try:
        document = Worst.parse(read_bounded(worst_path(folder), _MAX_BYTES), subject="worst.json")
        return document, load_tensors(pairs_path(folder), None, max_bytes=_MAX_BYTES)
    except (ArchipelagoError, OSError):
        return None
