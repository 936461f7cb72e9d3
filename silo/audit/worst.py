"""The pairs and the images that an operator should look at, in the private folder: nothing of this ever leaves."""

# Shape legend: S samples, P pairs, T suspects.

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ddm.audit.copies import CopyScale
from ddm.audit.membership import Membership
from ddm.errors import ArchipelagoError
from ddm.evaluation.copies import pixel_rows
from ddm.io.files import read_bounded, write_atomic
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.base import Document, ExpertId, NaturalInt
from silo.audit.parts import MeasurementStore
from silo.audit.subject import AuditedExpert

MAX_PAIRS = 12
MAX_SUSPECTS = 24
_MAX_BYTES = 1 << 26
# JSON has no infinity, and a distance over a tiny scale may be one.
_MAX_NUMBER = 1e30
_Distance = Annotated[float, Field(ge=0.0, le=_MAX_NUMBER)]
_Deviation = Annotated[float, Field(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]


class WorstFindings(Document):
    """The samples nearest to images that an expert learned, and the images that attacks suspect most.

    Attributes:
        pair_images: the number of each pair's image in the site's data, from 0.
        pair_distances: in pixels, over the usual distance of held-out images.
        suspects: numbers of images of the units that attacks suspect most, from 0.
        suspicion: the suspicion of each, in standard deviations of the units held out.
    """

    format: Literal["archipelago/audit-worst/1"] = "archipelago/audit-worst/1"
    expert_id: ExpertId
    pair_images: Annotated[tuple[NaturalInt, ...], Field(max_length=MAX_PAIRS)]
    pair_distances: Annotated[tuple[_Distance, ...], Field(max_length=MAX_PAIRS)]
    suspects: Annotated[tuple[NaturalInt, ...], Field(max_length=MAX_SUSPECTS)]
    suspicion: Annotated[tuple[_Deviation, ...], Field(max_length=MAX_SUSPECTS)]


def write_worst(
    expert: AuditedExpert,
    store: MeasurementStore,
    membership: Membership,
    neighbours: Mapping[str, Tensor],
    scale: CopyScale,
) -> None:
    """Write the worst pairs, with thumbnails, and the images of the units that attacks suspect most.

    Args:
        expert: the expert.
        store: the store of its measurements, with thumbnails of the samples.
        membership: the attacks on it.
        neighbours: the nearest learned images of samples, by pixels.
        scale: by pixels.
    """
    squared_distance_S = neighbours["pixels of samples"][:, 0]
    distance_S = squared_distance_S.sqrt()
    nearest_first_S = torch.argsort(distance_S, stable=True)
    sample_P = nearest_first_S[:MAX_PAIRS]
    place_P = neighbours["pixels near samples"][sample_P]
    image_P = expert.learned_N[place_P]
    # The floor is a third of the usual distance of images held out.
    usual_distance = 3 * scale.floor
    if usual_distance == 0:
        usual_distance = 1.0
    relative_P = distance_S[sample_P] / usual_distance
    relative_P = relative_P.clamp(max=_MAX_NUMBER)

    most_suspected_first_M = torch.argsort(membership.suspicion_M, descending=True)
    unit_T = most_suspected_first_M[:MAX_SUSPECTS]
    suspicion_T = membership.suspicion_M[unit_T].clamp(-_MAX_NUMBER, _MAX_NUMBER)
    # Images of members are sorted by unit: the first image of each.
    unit_I = expert.members.unit_I.contiguous()
    first_image_T = torch.searchsorted(unit_I, unit_T)
    document = WorstFindings(
        expert_id=expert.expert_id,
        pair_images=tuple(image_P.tolist()),
        pair_distances=tuple(relative_P.tolist()),
        suspects=tuple(expert.members.image_I[first_image_T].tolist()),
        suspicion=tuple(suspicion_T.tolist()),
    )
    write_atomic(_worst_path(expert.folder), document.encode(), mode=0o600)
    # One by one, since pairs are in the order of their distances, not in that of the files.
    samples = torch.stack([store.thumbnail(int(number)) for number in sample_P])
    images = torch.cat([expert.pixels[number[None]] for number in image_P])
    image_rows = pixel_rows(images)
    thumbnails = {
        "samples": samples.contiguous(),
        "images": image_rows.contiguous(),
    }
    save_tensors(_pairs_path(expert.folder), thumbnails)


def _worst_path(folder: Path) -> Path:
    return folder / "worst.json"


def _pairs_path(folder: Path) -> Path:
    """Return the path of the thumbnails of pairs: `samples` and `images`, as rows of values."""
    return folder / "pairs.safetensors"


def read_worst(folder: Path) -> tuple[WorstFindings, Mapping[str, Tensor]] | None:
    """Read what `write_worst` wrote; None where there is none that can be read."""
    try:
        data = read_bounded(_worst_path(folder), _MAX_BYTES)
        document = WorstFindings.parse(data, subject="worst.json")
        thumbnails = load_tensors(_pairs_path(folder), None, max_bytes=_MAX_BYTES)
    except (ArchipelagoError, OSError):
        return None
    return document, thumbnails
