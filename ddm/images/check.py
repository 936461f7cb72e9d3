"""What a person must see before a picture is used, beyond what its file declares: text in it, and faces in volumes."""

from dataclasses import replace

from ddm.images.heads import in_a_head
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import Flag
from ddm.images.text import suspect_text

_IMAGE_AXES = 3  # (C, H, W)
_VOLUME_AXES = 4  # (C, D, H, W)


def checked(picture: DecodedPicture) -> DecodedPicture:
    """Return a picture with the flags that its values call for, added to those that its decoder set."""
    if picture.values.ndim == _IMAGE_AXES:
        # A declared text makes the picture wait in any case, and the search for text takes time.
        suspected = Flag.DECLARED_TEXT not in picture.flags and suspect_text(picture.values)
        flag = Flag.SUSPECTED_TEXT
    elif picture.values.ndim == _VOLUME_AXES:
        suspected = Flag.DECLARED_FACE not in picture.flags and in_a_head(picture, picture.head)
        flag = Flag.FACE
    else:
        return picture
    return replace(picture, flags=picture.flags | {flag}) if suspected else picture
