"""Checkpoints of a training run: written atomically, verified on loading, refused for any other run.

A checkpoint is two files. ``step-<n>.safetensors`` holds every tensor; ``step-<n>.json``, written after it, holds the
rest and the tensor file's digest, so that its presence commits the checkpoint. The last two are kept: if the last one
is damaged, training resumes from the one before, and since each step is a function of its number only time is lost.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from torch import Tensor

from ddm.errors import DocumentError, FormatError, MissingFileError, SetupError, TrustError
from ddm.io.files import read_bounded, write_atomic
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors, spec_of
from ddm.protocol.base import Digest, Document, PositiveInt, sha256_file
from ddm.system.cores import NumThreads

# Two, so that a damaged last one costs only the steps since the one before.
KEPT = 2
_MAX_RECORD_BYTES = 4096
_MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{10})\.json")
_log = logging.getLogger(__name__)


class CheckpointRecord(Document):
    """A checkpoint's record: everything besides its tensors.

    Attributes:
        run: digest of everything that determines the run: settings, data, initial weights.
        step: training steps taken.
        loss: the smoothed loss, exactly.
        seconds: time spent training, over all restarts.
        threads: the number of threads of each process, which decides how sums are rounded.
        tensors: digest of the tensor file.
        seal: digest of all fields above, so that a damaged record is not mistaken for one of another run.
    """

    format: Literal["archipelago/checkpoint/1"] = "archipelago/checkpoint/1"
    run: Digest
    step: PositiveInt
    loss: float
    seconds: float
    threads: NumThreads
    tensors: Digest
    seal: Digest = "0" * 64

    def sealed(self) -> Self:
        """Return the record with its seal."""
        return self.model_copy(update={"seal": self.model_copy(update={"seal": "0" * 64}).digest})


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run in a folder of their own.

    Args:
        folder: created when missing.
        run: digest of everything that determines the run.
    """

    folder: Path
    run: str

    def save(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        loss: float,
        seconds: float,
        threads: int,
    ) -> None:
        """Write a checkpoint durably, then drop all but the last two.

        Raises:
            OSError: the disk is full or the folder not writable; earlier checkpoints are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._tensor_path(step)
        save_tensors(path, tensors)
        record = CheckpointRecord(
            run=self.run,
            step=step,
            loss=loss,
            seconds=seconds,
            threads=threads,
            tensors=sha256_file(path),
        )
        write_atomic(path.with_suffix(".json"), record.sealed().encode())
        self._prune()

    def load(self, like: Mapping[str, Tensor]) -> tuple[CheckpointRecord, dict[str, Tensor]] | None:
        """Return the last complete checkpoint, or None where there is none.

        Args:
            like: tensors with the expected names, dtypes and shapes.

        Raises:
            SetupError: it belongs to another run.
        """
        specs = {name: spec_of(tensor) for name, tensor in like.items()}
        for path in self._records():
            try:
                return self._load_one(path, specs)
            except (FormatError, TrustError, MissingFileError) as error:
                _log.warning(
                    "checkpoint %s is damaged, trying the one before: %s", path.stem, error
                )
        return None

    def _load_one(
        self, path: Path, specs: Mapping[str, TensorSpec]
    ) -> tuple[CheckpointRecord, dict[str, Tensor]]:
        data = read_bounded(path, _MAX_RECORD_BYTES)
        record = CheckpointRecord.parse(data, subject=path.name, limit=_MAX_RECORD_BYTES)
        # Before the run is compared: a damaged digest of the run does not mean another run.
        if record != record.sealed():
            raise DocumentError(
                path.name, expected="a seal that matches its fields", got="a seal of other fields"
            )
        # Not the warning of a damaged one: going on from another run's weights would be a silent mistake, and starting
        # again would throw away what somebody still wants.
        if record.run != self.run:
            raise SetupError(
                f"checkpoints in {self.folder.name}",
                expected="checkpoints of this plan, these images and these initial weights",
                got="checkpoints of another training",
                remedy="Give this training an empty folder, or bring back the plan and the data of the checkpoints.",
            )
        tensor_path = self._tensor_path(record.step)
        digest = sha256_file(tensor_path) if tensor_path.is_file() else None
        if digest != record.tensors:
            raise DocumentError(
                tensor_path.name,
                expected=f"sha256 {record.tensors[:16]}..., as its record says",
                got=f"sha256 {digest[:16]}..." if digest else "no such file",
            )
        size = sum(spec.bytes for spec in specs.values()) + _MAX_HEADER_BYTES
        return record, load_tensors(tensor_path, specs, max_bytes=size)

    def _tensor_path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}.safetensors"

    def _records(self) -> list[Path]:
        """Return the records of committed checkpoints, the last one first."""
        if not self.folder.is_dir():
            return []
        records = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        # The steps in the names have the same number of digits, so the order of names is theirs.
        return sorted(records, reverse=True)

    def _prune(self) -> None:
        for path in self._stale():
            path.unlink(missing_ok=True)

    def _stale(self) -> Iterator[Path]:
        """Yield the files of older checkpoints and of interrupted writes, records before their tensors."""
        latest = {path.stem for path in self._records()[:KEPT]}
        for path in sorted(self.folder.iterdir()):
            is_interrupted = path.name.startswith(".step-") and path.name.endswith(".part")
            is_older = path.name.startswith("step-") and path.stem not in latest
            if is_interrupted or is_older:
                yield path
