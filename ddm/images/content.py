"""The content of one image file: already in memory, or still to be read from its path."""

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class FileContent:
    """One file, or one image inside another file, such as a tar archive.

    Attributes:
        path: where the file is; None for an image inside another file.
        data: the whole content, if it was read already; None to read it from `path`.
        name: name of the file or of the member of an archive; it distinguishes formats that share their first bytes.
    """

    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    name: str = ""

    @classmethod
    def of(cls, path: Path, data: bytes | None = None) -> "FileContent":
        """Return the content of a file, which may have been read already."""
        return cls(path, data, path.name)

    def open(self) -> BinaryIO:
        """Open the content to be read from its beginning; the stream can seek."""
        if self.data is not None:
            return BytesIO(self.data)
        if self.path is None:
            raise TypeError("content without data needs a path")
        return self.path.open("rb")

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes."""
        if self.data is not None:
            return self.data[:num_bytes]
        with self.open() as stream:
            return stream.read(num_bytes)
