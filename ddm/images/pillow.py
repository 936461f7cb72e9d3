"""Opens images with Pillow, without its own bounds, which `Limits` replace, and strictly: broken files are errors."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from PIL import Image, ImageFile


@contextmanager
def opened(stream: BinaryIO, kind: str) -> Iterator[ImageFile.ImageFile]:
    """Open an image whose size was checked, or is checked before its pixels are loaded.

    Pillow's settings belong to the process. They are put back, since pydicom decodes with Pillow too.

    Args:
        stream: the file.
        kind: Pillow's name of its format, the only one that is tried.
    """
    max_pixels = Image.MAX_IMAGE_PIXELS
    load_truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(stream, formats=[kind]) as image:
                yield image
    finally:
        Image.MAX_IMAGE_PIXELS = max_pixels
        ImageFile.LOAD_TRUNCATED_IMAGES = load_truncated
