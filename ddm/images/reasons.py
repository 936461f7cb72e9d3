"""Why a file gives no picture, and what a person must see before a picture is used: two fixed lists of words.

The words may leave a decoder's process and appear in reports: they say nothing about the file except what is wrong with
it.
"""

from enum import StrEnum

from ddm.errors import DataError


class Reason(StrEnum):
    """Why a file, or one image of it, cannot be used."""

    MISSING = "no such file"
    TABLE = "table that cannot be used"
    REPEATED = "named twice in the table"
    FOLDER_LINK = "link to a folder"
    SPECIAL = "not a regular file"
    OUTSIDE = "outside of the data folder"
    CLUTTER = "other file, skipped"
    FORBIDDEN = "cannot be read"
    EMPTY = "empty file"
    UNKNOWN = "not an image"
    ARCHIVE = "archive"
    NO_PIXELS = "no pixels"
    NO_PICTURE = "measurements, not a picture"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    UNSUPPORTED = "unsupported encoding"
    AMBIGUOUS = "ambiguous"
    SHAPE = "unsupported shape"
    NOT_FINITE = "values not finite"
    TOO_LARGE = "too large"
    MEMORY = "too much memory"
    TIME = "too much time"
    CRASHED = "decoder crashed"
    CHANGED = "changed during the scan"
    OTHER_PART = "in a part that is not used"


class Flag(StrEnum):
    """What may identify a patient, or was not made to be trained on: what files say about themselves comes first."""

    DECLARED_TEXT = "burned-in annotation declared"
    DECLARED_FACE = "recognizable features declared"
    FACE = "volume that may show a face"
    OVERLAY = "overlay"
    THUMBNAIL = "embedded thumbnail"
    SCREENSHOT = "screenshot"
    SECONDARY_CAPTURE = "secondary capture"
    ULTRASOUND = "ultrasound"
    SUSPECTED_TEXT = "burned-in text suspected"


class ImageError(DataError):
    """A file that gives no picture, for one of the reasons above; it never names the file.

    Args:
        reason: what is the matter.
        detail: more about it, in words of this project: no value, name or tag of the file.
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(
            "image",
            expected="a file that gives a picture",
            got=f"{reason}{detail and f' ({detail})'}",
        )
