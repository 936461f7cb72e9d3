"""Where the frames of a DICOM file lie: as a volume, or as slices of a scan that may be of a head."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.images.dicom_tags import group_of, value_of
from ddm.images.heads import names_head
from ddm.images.picture import Picture, SliceLocation

_DESCRIPTIONS = ("SeriesDescription", "StudyDescription", "ProtocolName", "PerformedProcedureStepDescription")
_MOST_MM = 1e5  # beyond which a number is no place or length in a scanner
_SECTIONS = ("CT", "MR", "PT", "NM")  # modalities whose images are sections of the body


def spacing_of(tags: Any, number: int) -> tuple[float, float] | None:
    """Return the mm between the rows and the columns of a frame; None where the file does not say."""
    group = group_of(tags, number, "PixelMeasuresSequence")
    for name in ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing"):
        value = value_of(group, name)
        if value is not None and len(value) == 2 and all(0 < float(side) < float("inf") for side in value):
            return float(value[0]), float(value[1])
    return None


def volume_of(tags: Any, num: int) -> tuple[list[int], NDArray[np.float64]] | None:
    """Return the order of the frames along their normal, and the matrix from (W, H, D) to right, front and top."""
    if (
        num < 2
        or int(value_of(tags, "SamplesPerPixel") or 1) != 1
        or not value_of(tags, "PerFrameFunctionalGroupsSequence")
    ):
        return None
    places, ways = [], []
    for number in range(num):
        place, way = plane_of(tags, number)
        if not place:
            return None
        places.append(place)
        ways.append(way)
    spacing = spacing_of(tags, 0)
    place_N3, way_N6 = np.array(places), np.array(ways)
    if spacing is None or not np.allclose(way_N6, way_N6[0], atol=1e-3):
        return None
    row, column = way_N6[0, :3], way_N6[0, 3:]
    along_N = place_N3 @ np.cross(row, column)
    order = np.argsort(along_N, kind="stable")
    steps = np.diff(along_N[order])
    if not steps.min() > 0 or steps.max() > 1.01 * steps.min() + 1e-3:
        return None
    step = (place_N3[order[-1]] - place_N3[order[0]]) / (num - 1)
    matrix = np.eye(4)
    matrix[:3, 0], matrix[:3, 1], matrix[:3, 2] = row * spacing[1], column * spacing[0], step
    matrix[:2] *= -1  # DICOM counts to the left and to the back
    return [int(number) for number in order], matrix


def is_of_head(tags: Any) -> bool | None:
    """Whether the file names a head: as the part of the body, or in a description; None where it names no part."""
    if any(names_head(str(value_of(tags, name) or "")) for name in _DESCRIPTIONS):
        return True
    region = value_of(tags, "AnatomicRegionSequence") or value_of(
        group_of(tags, 0, "FrameAnatomySequence"), "AnatomicRegionSequence"
    )
    coded = str(value_of(region[0], "CodeMeaning") or "") if region else ""
    part = (str(value_of(tags, "BodyPartExamined") or "") or coded).strip()
    return names_head(part) if part else None


def slice_of(tags: Any, number: int, picture: Picture, head: bool | None) -> SliceLocation | None:
    """Return which scan an image is a slice of, where that may be of a head; None of other images and parts.

    Where nothing names a part of the body, the slices' places must tell how large what they show is.
    """
    if head is False:
        return None
    place, way = plane_of(tags, number)
    series = str(value_of(tags, "SeriesInstanceUID") or value_of(tags, "StudyInstanceUID") or "").strip()
    section = str(value_of(tags, "Modality") or "").strip().upper() in _SECTIONS
    if not (place and series) if head is None else not (place or section):
        return None
    along = float(np.dot(place, np.cross(way[:3], way[3:]))) if place else float("nan")
    height, width = np.multiply(picture.values.shape[1:], picture.spacing or (np.nan, np.nan))
    return SliceLocation(
        series,
        along if abs(along) < _MOST_MM else None,
        (float(height), float(width)) if max(height, width) < _MOST_MM else None,
        head,
    )


def plane_of(tags: Any, number: int) -> tuple[list[float], list[float]]:
    """Return where a frame lies and which way its rows and columns go, 3 and 6 numbers; none where it does not say."""
    found = []
    for group, name in (
        ("PlanePositionSequence", "ImagePositionPatient"),
        ("PlaneOrientationSequence", "ImageOrientationPatient"),
    ):
        try:
            found.append([float(each) for each in value_of(group_of(tags, number, group), name) or ()])
        except (TypeError, ValueError):  # no list, or no numbers
            return [], []
    whole = [len(each) for each in found] == [3, 6] and bool(np.isfinite(found[0] + found[1]).all())
    return (found[0], found[1]) if whole else ([], [])
