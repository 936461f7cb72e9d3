"""The pictures at a path, as a test needs them: an error where one cannot be read."""

from collections.abc import Iterator
from pathlib import Path

from ddm.images import ImageError, read_pictures
from ddm.images.picture import DecodedPicture


def read_all_pictures(path: Path) -> Iterator[DecodedPicture]:
    """Yield the pictures; raise the first error."""
    for picture in read_pictures(path):
        if isinstance(picture, ImageError):
            raise picture
        yield picture
