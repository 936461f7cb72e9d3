"""A site's images, scans and cohorts by keywords, as tests need them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddm.images.picture import DecodeLimits
from silo.config import ImagesSettings
from silo.data.cohort import Cohort, CohortRequest, load_cohort
from silo.images.scan import scan
from silo.images.source import FOLDER, ImageSource
from silo.images.summary import Summary


def settings_of(
    limits: DecodeLimits, processes: int = 1, columns: Mapping[str, str] | None = None
) -> ImagesSettings:
    """Return settings with these limits, also such as no configuration may state."""
    update = {
        "seconds": limits.seconds,
        "memory_mib": limits.memory_bytes >> 20,
        "processes": processes,
    }
    return ImagesSettings(columns=columns or {}).model_copy(update=update)


def source_at(
    data: Path, folder: Path, settings: ImagesSettings | None = None, **others: Any
) -> ImageSource:
    """Return images whose scans are remembered in a folder."""
    return ImageSource(data, folder, settings or ImagesSettings(), **others)


def scan_at(
    data: Path,
    folder: Path,
    limits: DecodeLimits,
    *,
    columns: Mapping[str, str] | None = None,
    processes: int = 1,
    **others: Any,
) -> Summary:
    """Scan images within limits."""
    return scan(source_at(data, folder, settings_of(limits, processes, columns)), **others)


def cohort_at(
    path: Path,
    data: Any,
    *,
    salt: bytes,
    min_images: int = 1,
    folder: Path | None = None,
    settings: ImagesSettings | None = None,
    parts: tuple[str, ...] | None = None,
    advance: Any = lambda num_done, num: None,
    **request: Any,
) -> Cohort:
    """Load the cohort of a plan, as a site's worker does.

    Args:
        path: of the images.
        data: what the plan says of them.
        salt: of the cohort's digests.
        min_images: fewest images that the plan takes.
        folder: where scans are remembered; beside the images by default.
        settings: of the site's images.
        parts: of a data set that are read; all by default.
        advance: is told how many images are read, of how many.
        request: other fields of the `CohortRequest`.
    """
    source = source_at(path, (folder or path.parent / "private") / FOLDER, settings, parts=parts)
    return load_cohort(
        source, CohortRequest(data=data, min_images=min_images, **request), salt, folder, advance
    )
