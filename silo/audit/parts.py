"""Keeps the measurements of an unfinished audit, a file each, so that a killed audit continues where it stopped."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddm.errors import TensorFileError
from ddm.io.tensors import load_tensors, save_tensors

CHUNK = 512
"""Samples in one file."""
_MAX_BYTES = 1 << 36


@dataclass(frozen=True)
class MeasurementStore:
    """The measurements of one expert's audit, in a folder.

    Args:
        folder: private to the worker; named by a digest of everything that the measurement depends on.
    """

    folder: Path

    @classmethod
    def open(cls, parent: Path, digest: str) -> "MeasurementStore":
        """Open the store of one audit; those of other audits in the same folder are removed."""
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = parent / digest[:32]
        # Scores of other weights or images would give a wrong verdict.
        for other in parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(exist_ok=True, mode=0o700)
        return cls(folder)

    def load_or_measure(
        self,
        name: str,
        measure: Callable[[], Mapping[str, Tensor]],
    ) -> Mapping[str, Tensor]:
        """Return a measurement from its file; where there is none, take it and write it first."""
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            try:
                return load_tensors(path, None, max_bytes=_MAX_BYTES)
            except TensorFileError:
                # Damaged by the disk, since files are written whole or not at all: measured again.
                path.unlink()
        tensors = {}
        for key, tensor in measure().items():
            # safetensors stores only tensors that are contiguous in memory.
            tensors[key] = tensor.contiguous()
        save_tensors(path, tensors)
        return tensors

    def thumbnail(self, number: int) -> Tensor:
        """Return the thumbnail of one sample, as a row of values."""
        row = number % CHUNK
        first_number = number - row
        path = self.folder / f"samples-{first_number}.safetensors"
        chunk = load_tensors(path, None, max_bytes=_MAX_BYTES)
        return chunk["pixels"][row]


def discard_measurements(parent: Path) -> None:
    """Remove what is not needed once the report is written."""
    shutil.rmtree(parent, ignore_errors=True)
