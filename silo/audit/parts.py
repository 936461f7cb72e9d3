"""What an audit has measured by now, a file each, so that one that was killed goes on where it stopped."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddm.errors import TensorFileError
from ddm.io.tensors import load_tensors, save_tensors

CHUNK = 512
"""Samples in one part."""
_MAX_BYTES = 1 << 36


@dataclass(frozen=True)
class Parts:
    """The folder of one expert's audit.

    Args:
        folder: private to the worker; named by a digest of everything that the measurement depends on.
    """

    folder: Path

    @classmethod
    def open(cls, within: Path, digest: str) -> "Parts":
        """Open the parts of one measurement; those of others in the same folder are removed."""
        folder = within / digest[:32]
        for other in within.iterdir() if within.is_dir() else ():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(folder)

    def once(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return a part: what was written before, or what `make` returns, which is written first."""
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            try:
                return load_tensors(path, None, max_bytes=_MAX_BYTES)
            except TensorFileError:
                path.unlink()
        made = {key: value.contiguous() for key, value in make().items()}
        save_tensors(path, made)
        return made

    def thumbnail(self, number: int) -> Tensor:
        """Return the thumbnail of one sample, as a row of values."""
        path = self.folder / f"samples-{number - number % CHUNK}.safetensors"
        return load_tensors(path, None, max_bytes=_MAX_BYTES)["pixels"][number % CHUNK]


def discard_parts(within: Path) -> None:
    """Remove what is not needed once the report is written."""
    shutil.rmtree(within, ignore_errors=True)
