"""Samples drawn from an ensemble: images, the experts behind them, and how they are saved."""

# Shape legend: N samples, K experts.
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddm.errors import MathError, NumericalError, SetupError
from ddm.io.pictures import check_pictures, grid, pictures, write_samples
from ddm.sampling.provenance import Provenance

if TYPE_CHECKING:
    from PIL.Image import Image

# Samples that a notebook shows.
_SHOWN = 64


@dataclass(frozen=True, repr=False)
class Samples:
    """Samples drawn from an ensemble.

    Args:
        images: float32, shape (N, C, H, W) or (N, C, D, H, W), on the CPU, in the data's range but not clipped to it;
            float64 where experts without an autoencoder were sampled in that.
        expert_N: the last expert that each sample followed; for a mixture, one drawn from its last weights.
        num_experts: K.
        latents: the samples as the experts produced them; the same as `images` where experts work on pixels.
        provenance: the experts that each sample followed, and the times at which it changed them.
        release: digest of the manifest of the release that they come from; empty where there is none.
        classes: the class that each sample was asked for, by its name, or its number where it has none; empty where
            they were asked for none.
        value_range: the data's lowest and highest value.
    """

    images: Tensor
    expert_N: Tensor
    num_experts: int
    latents: Tensor
    provenance: Provenance | None = None
    release: str = ""
    classes: tuple[str, ...] = ()
    value_range: tuple[float, float] = (-1.0, 1.0)

    def __repr__(self) -> str:
        if not len(self.expert_N):
            return f"Samples of shape {tuple(self.images.shape)}"
        shares = ", ".join(f"{share:.2f}" for share in self.shares[:8])
        if self.num_experts > 8:
            shares += ", ..."
        return f"Samples of shape {tuple(self.images.shape)}, shares of the experts {shares}"

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator["Samples"]:
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, which: int | slice | Sequence[int] | Tensor) -> "Samples":
        """Return some samples, by number, slice, list of numbers or mask; ``samples[0]`` holds one."""
        row_N = torch.arange(len(self))
        try:
            rows = row_N[which].reshape(-1)
        except (IndexError, TypeError) as error:
            expected = f"numbers from 0 to {len(self) - 1}, or a slice"
            raise MathError("samples", expected=expected, got=repr(which)) from error
        numbers = rows.tolist()
        classes = self.classes
        if classes:
            classes = tuple(classes[number] for number in numbers)
        provenance = self.provenance
        if provenance is not None:
            provenance = provenance.at(numbers)
        return replace(
            self,
            images=self.images[rows],
            expert_N=self.expert_N[rows],
            latents=self.latents[rows],
            provenance=provenance,
            classes=classes,
        )

    def to_pil(self) -> list["Image"]:
        """Return the samples as pictures, clipped to the data's range; of a volume, its middle slice.

        Raises:
            SetupError: channels that no picture has.
        """
        check_pictures(self.images.shape[1:])
        return pictures(self.images, self.value_range)

    def _repr_png_(self) -> bytes | None:
        # What a notebook shows: a grid, where the samples are pictures.
        try:
            check_pictures(self.images.shape[1:])
        except SetupError:
            return None
        first = self[:_SHOWN]
        drawn = grid(first.images, first.expert_N.tolist(), value_range=self.value_range)
        buffer = BytesIO()
        drawn.save(buffer, "PNG")
        return buffer.getvalue()

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the samples of each expert, to be compared with the prior; NaN without samples."""
        counts_K = torch.bincount(self.expert_N, minlength=self.num_experts).double()
        share_K = counts_K / counts_K.sum()
        return tuple(share_K.tolist())

    def save(self, path: Path | str) -> str:
        """Write the samples, each file marked as synthetic, with the release's digest and the classes asked for.

        | name | content | marks |
        | --- | --- | --- |
        | FILE.png | a grid; an edge's colour tells the expert | text chunks Synthetic, Release and Class |
        | FILE.npz | `images`, float, and `expert`, int64 | arrays `synthetic`, `release` and `class` |
        | FILE.nii, FILE.nii.gz | all volumes | the field `descrip`, and an extension |
        | a name without ending | a folder of PNG files, or of NIfTI files for volumes | as above |

        Values are clipped to the data's range, whose ends are black and white in a PNG.

        Args:
            path: see above; folders are made, and what is there is replaced.

        Returns:
            What was written, in words.

        Raises:
            SetupError: another ending, channels that no picture has, or NIfTI for images that are not volumes.
            OSError: it cannot be written.
        """
        owners = self.expert_N.tolist()
        return write_samples(
            self.images, owners, Path(path), self.release, self.classes, self.value_range
        )


def check_finite(x_0: Tensor, expert_N: Tensor, names: Sequence[str]) -> None:
    """Refuse samples that are not finite.

    Args:
        x_0: samples, shape (N, ...).
        expert_N: the last expert of each.
        names: the names of the experts; their numbers if they have no names.

    Raises:
        NumericalError: which names the experts of those samples.
    """
    broken_N = ~x_0.flatten(1).isfinite().all(1)
    num_broken = int(broken_N.sum())
    if not num_broken:
        return
    # For a mixture this is one of several that a sample followed, so that it is a hint and no proof.
    experts = sorted(set(expert_N[broken_N].tolist()))
    if names:
        words = ", ".join(names[expert] for expert in experts)
    else:
        words = ", ".join(str(expert) for expert in experts)
    raise NumericalError(
        "samples",
        expected="finite numbers",
        got=f"NaN or infinity in {num_broken} of {len(x_0)} samples, of experts {words}",
        remedy="Take more steps or less guidance; if that does not help, leave these experts out by a prior of 0.",
    )
