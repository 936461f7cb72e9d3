"""The folder of the signer of releases: its keys, its TUF metadata, its published versions, and who may sign now."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.io.changes import finish_change
from ddm.io.files import require_file
from ddm.io.locks import locked
from ddm.protocol.base import sha256_file

# Readers get the first root of trust under this name, from a federation and from one owner alike.
ROOT_NAME = "1.root.json"
# The bound of the largest role, `targets` (`ddm.trust.metadata.LIMITS`).
MAX_TUF_BYTES = 5_000_000


@dataclass(frozen=True)
class PublisherFolder:
    """A folder with keys that sign releases."""

    path: Path

    @property
    def keys(self) -> Path:
        """Private keys, encrypted."""
        return self.path / "keys"

    @property
    def tuf(self) -> Path:
        """The TUF repository's metadata."""
        return self.path / "tuf" / "metadata"

    @property
    def root_digest(self) -> str:
        """The digest of the first root of trust, which names the federation in everything that is signed for it.

        Raises:
            MissingFileError: its holders have not signed it yet.
        """
        remedy = (
            "The holders of root sign it first: `aggregator status FED` shows whose signatures are "
            "missing."
        )
        root = require_file(self.tuf / ROOT_NAME, "the federation's root of trust", remedy)
        return sha256_file(root)

    @property
    def releases(self) -> Path:
        """Published versions, numbered."""
        return self.path / "releases"

    @contextmanager
    def signing_lock(self) -> Iterator[None]:
        """Lock the keys and the metadata; every command that signs holds this lock.

        Raises:
            BusyError: another process holds it.
        """
        with locked(self.tuf.parent, "signer"):
            # A crash may have left a committed change that is not completely in place.
            finish_change(self.path)
            yield
