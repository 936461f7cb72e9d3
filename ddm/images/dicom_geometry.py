"""Where the frames of a DICOM file are: as a volume, or as slices of a scan that may be of a head."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.images.dicom_tags import floats_of, group_of, sequence_of, text_of, value_of
from ddm.images.faces import names_head
from ddm.images.picture import Picture, SliceLocation
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Spacing

_DESCRIPTIONS = (
    "SeriesDescription",
    "StudyDescription",
    "ProtocolName",
    "PerformedProcedureStepDescription",
)
_MAX_MM = 1e5  # beyond which a number is no place or length in a scanner
_SECTIONS = ("CT", "MR", "PT", "NM")  # modalities whose images are sections of the body
_SPACINGS = ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing")
# Of the length of a direction, of a right angle, and between directions of two frames.
_UNIT_ERROR = 1e-3
_UNEVEN_STEPS = 0.01  # share of a step
_ROUNDED_MM = 1e-3  # of positions that are written as decimals
_SHEAR = 0.1  # pixels that a slice may be beside the line through the first one, along the normal
_UNEQUAL_RATIOS = 0.01


@dataclass(frozen=True)
class Plane:
    """Where a frame is in the patient, in mm to the left, to the back and to the head.

    Attributes:
        position_3: of the first pixel.
        row_3: direction in which the columns follow each other, of length 1.
        column_3: direction in which the rows follow each other.
    """

    position_3: NDArray[np.float64]
    row_3: NDArray[np.float64]
    column_3: NDArray[np.float64]

    @property
    def normal_3(self) -> NDArray[np.float64]:
        """Direction across the frame, of length 1."""
        return np.cross(self.row_3, self.column_3)


def spacing_of(tags: Any, number: int) -> Spacing | None:
    """Return the mm between the rows and between the columns of a frame; None where the file does not say.

    Where a file states no more than how tall and how wide a pixel is in proportion, and the two differ, the shorter
    one counts as 1.

    Raises:
        ImageError: a proportion that contradicts the lengths.
    """
    lengths = lengths_of(tags, number)
    ratio = _aspect_ratio(tags)
    if ratio is None:
        return lengths
    if lengths is None:
        if ratio > 1:
            return (ratio, 1.0)
        return (1.0, 1.0 / ratio)
    if abs(lengths[0] / lengths[1] / ratio - 1) > _UNEQUAL_RATIOS:
        raise ImageError(Reason.DAMAGED, "PixelAspectRatio and PixelSpacing contradict each other")
    return lengths


def lengths_of(tags: Any, number: int) -> Spacing | None:
    """Return the mm between the rows and between the columns of a frame, from the first tag that states them."""
    # What is stated of the frame comes before what is stated of all.
    sources = [group_of(tags, number, "PixelMeasuresSequence")]
    if sources[0] is not tags:
        sources.append(tags)
    for source in sources:
        for name in _SPACINGS:
            lengths = floats_of(source, name)
            if len(lengths) == 2 and min(lengths) > 0:
                return lengths[0], lengths[1]
    return None


def _aspect_ratio(tags: Any) -> float | None:
    """Return the height of a pixel in widths (PS3.3 C.7.6.3.1.7); None where it is not stated, or 1."""
    sides = floats_of(tags, "PixelAspectRatio")
    if len(sides) != 2 or min(sides) <= 0:
        return None
    height, width = sides
    if height == width:
        return None
    return height / width


def volume_of(
    tags: Any,
    num_frames: int,
    samples: int,
) -> tuple[list[int], NDArray[np.float64]] | None:
    """Return the order of frames that make a volume, and its matrix; None for frames that make none.

    They make one if all face the same way and are as large, and if each is one step along their normal from the one
    before. The slices of a tilted gantry are shifted against each other: as a volume they would be sheared.

    Returns:
        The numbers of the frames along their normal, and the matrix from (W, H, D) to mm to the right, front and top.
    """
    groups = sequence_of(tags, "PerFrameFunctionalGroupsSequence")
    if num_frames < 2 or samples != 1 or not len(groups):
        return None
    first_plane = plane_of(tags, 0)
    spacing = lengths_of(tags, 0)
    if first_plane is None or spacing is None:
        return None
    positions = []
    for number in range(num_frames):
        plane = plane_of(tags, number)
        if plane is None or not _faces_alike(plane, first_plane):
            return None
        if lengths_of(tags, number) != spacing:
            return None
        positions.append(plane.position_3)
    position_N3 = np.array(positions)
    normal_3 = first_plane.normal_3
    along_N = position_N3 @ normal_3
    order = np.argsort(along_N, kind="stable")
    steps = np.diff(along_N[order])
    # Two frames in one place, or a gap where a frame is missing, make no volume. NaN fails the first comparison.
    smallest_step = steps.min()
    max_step = (1 + _UNEVEN_STEPS) * smallest_step + _ROUNDED_MM
    if not smallest_step > _ROUNDED_MM or steps.max() > max_step:
        return None
    # What is left of each position beside the normal: a tilted gantry.
    moved_N3 = position_N3 - position_N3[0]
    moved_along_N3 = np.outer(along_N - along_N[0], normal_3)
    aside_N3 = moved_N3 - moved_along_N3
    distance_aside_N = np.linalg.norm(aside_N3, axis=1)
    if distance_aside_N.max() > _SHEAR * min(spacing):
        return None
    between_rows, between_columns = spacing
    matrix = np.eye(4)
    matrix[:3, 0] = first_plane.row_3 * between_columns
    matrix[:3, 1] = first_plane.column_3 * between_rows
    matrix[:3, 2] = normal_3 * steps.mean()
    matrix[:2] *= -1  # DICOM counts to the left and to the back
    return [int(number) for number in order], matrix


def _faces_alike(plane: Plane, other: Plane) -> bool:
    return np.allclose(plane.row_3, other.row_3, atol=_UNIT_ERROR) and np.allclose(
        plane.column_3,
        other.column_3,
        atol=_UNIT_ERROR,
    )


def plane_of(tags: Any, number: int) -> Plane | None:
    """Return where a frame is; None where the file does not say, or gives no two directions at a right angle."""
    position_group = group_of(tags, number, "PlanePositionSequence")
    orientation_group = group_of(tags, number, "PlaneOrientationSequence")
    try:
        position = floats_of(position_group, "ImagePositionPatient")
        directions = floats_of(orientation_group, "ImageOrientationPatient")
    except ImageError:  # no numbers
        return None
    if len(position) != 3 or len(directions) != 6:
        return None
    row_3 = np.array(directions[:3])
    column_3 = np.array(directions[3:])
    lengths = np.linalg.norm([row_3, column_3], axis=1)
    length_error = np.abs(lengths - 1).max()
    cosine = float(row_3 @ column_3)
    if length_error > _UNIT_ERROR or abs(cosine) > _UNIT_ERROR:
        return None
    return Plane(np.array(position), row_3, column_3)


def is_of_head(tags: Any) -> bool | None:
    """Whether the file names a head: as the part of the body, or in a description; None where it names no part."""
    if any(names_head(str(value_of(tags, name) or "")) for name in _DESCRIPTIONS):
        return True
    region = value_of(tags, "AnatomicRegionSequence")
    if not region:
        region = value_of(group_of(tags, 0, "FrameAnatomySequence"), "AnatomicRegionSequence")
    coded = ""
    if region:
        coded = str(value_of(region[0], "CodeMeaning") or "")
    part = (str(value_of(tags, "BodyPartExamined") or "") or coded).strip()
    if not part:
        return None
    return names_head(part)


def slice_of(
    tags: Any,
    number: int,
    picture: Picture,
    head: bool | None,
) -> SliceLocation | None:
    """Return which scan an image is a slice of, where that may be of a head; None for other images and parts.

    Where nothing names a part of the body, the slices' places must tell how large what they show is.
    """
    if head is False:
        return None
    plane = plane_of(tags, number)
    series = str(
        value_of(tags, "SeriesInstanceUID") or value_of(tags, "StudyInstanceUID") or ""
    ).strip()
    is_section = text_of(tags, "Modality").upper() in _SECTIONS
    if head is None and not (plane is not None and series):
        return None
    if head and not (plane is not None or is_section):
        return None
    place_mm = None
    if plane is not None:
        along = float(plane.position_3 @ plane.normal_3)
        if abs(along) < _MAX_MM:
            place_mm = along
    sides_mm = None
    lengths = lengths_of(tags, number)
    if lengths is not None:
        num_rows, num_columns = picture.values.shape[1:]
        height = num_rows * lengths[0]
        width = num_columns * lengths[1]
        if max(height, width) < _MAX_MM:
            sides_mm = (height, width)
    return SliceLocation(series, place_mm, sides_mm, head)
