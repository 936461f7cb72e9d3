"""WebP through Pillow and libwebp: lossy and lossless; frames of an animation are images of their own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.pillow import opened
from ddm.images.raster import BYTE_RANGE, Metadata, over_black, picture_of
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Numbers


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture]:
    """Yield the images of one file.

    Args:
        content: the file.
        kind: WEBP.
        limits: the most that it may ask for.

    Raises:
        ImageError: pixels that cannot be decoded, with the true reason.
    """
    head = content.head(12)
    with content.open() as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        # The size in a RIFF header does not count the first eight bytes.
        if int.from_bytes(head[4:8], "little") + 8 > size:
            raise ImageError(Reason.TRUNCATED, "RIFF")
        with opened(stream, "WEBP") as image:
            limits.check(image.height, image.width, 4)
            num_frames = int(getattr(image, "n_frames", 1))
            limits.check_pictures(num_frames)
            metadata = _metadata(image.info)
            for frame in range(num_frames):
                image.seek(frame)
                yield picture_of(
                    _colours(image),
                    kind,
                    full=BYTE_RANGE,
                    orientation=metadata.orientation,
                    flags=metadata.flags(colours=True),
                )


def _colours(image: Image.Image) -> Numbers:
    values: Numbers = np.asarray(image)
    if image.mode == "RGBA":
        return over_black(values[..., :3], values[..., 3], 255)
    if image.mode != "RGB":
        raise ImageError(Reason.UNSUPPORTED, "neither RGB nor RGBA")
    return values


def _metadata(blocks: dict[Any, Any]) -> Metadata:
    metadata = Metadata()
    if blocks.get("exif"):
        metadata.add_exif(blocks["exif"])
    if blocks.get("xmp"):
        metadata.add_text(blocks["xmp"])
    return metadata
