"""The options of `ddm sample` that begin with images of one's own: image-to-image and inpainting."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddm.cli.options import WHAT
from ddm.errors import SetupError

if TYPE_CHECKING:
    from torch import Tensor

    from ddm.ensemble import Ensemble
    from ddm.protocol.data import DataSpec
    from ddm.sampling.samples import Samples

InitOption = Annotated[
    Path | None,
    typer.Option(
        "--init",
        metavar="FILE",
        help="With --t-start: images to begin from, pictures or .npz.",
        rich_help_panel=WHAT,
    ),
]
TStartOption = Annotated[
    float | None,
    typer.Option(
        "--t-start",
        min=0.0,
        max=1.0,
        help="With --init: noise them to T; 1 leaves nothing.",
        rich_help_panel=WHAT,
    ),
]
InpaintOption = Annotated[
    Path | None,
    typer.Option(
        "--inpaint",
        metavar="FILE",
        help="With --mask: images to complete, pictures or .npz.",
        rich_help_panel=WHAT,
    ),
]
MaskOption = Annotated[
    Path | None,
    typer.Option(
        "--mask",
        metavar="FILE",
        help="With --inpaint: white where to draw, black where to keep.",
        rich_help_panel=WHAT,
    ),
]


@dataclass(frozen=True)
class Editing:
    """What a user says about images to begin from; everything None for samples from noise.

    Args:
        init: the file of images to vary.
        t_start: how far they are noised.
        inpaint: the file of images to complete.
        mask: the file that says where.
        corrections: after each step of an inpainting; None for the default.

    Raises:
        SetupError: options that do not go together.
    """

    init: Path | None
    t_start: float | None
    inpaint: Path | None
    mask: Path | None
    corrections: int | None

    def __post_init__(self) -> None:
        if self.init and self.inpaint:
            raise SetupError("--init", expected="either --init or --inpaint", got="both of them")
        pairs = (
            ("--init", self.init, "--t-start", self.t_start),
            ("--inpaint", self.inpaint, "--mask", self.mask),
        )
        for one, given, other, also in pairs:
            if (given is None) != (also is None):
                there, missing = (one, other) if also is None else (other, one)
                raise SetupError(there, expected=f"{missing} as well", got=f"{there} alone")
        if self.t_start == 0:
            raise SetupError(
                "--t-start", expected="above 0", got="0, at which the images stay as they are"
            )
        if self.corrections is not None and not self.inpaint:
            raise SetupError(
                "--set corrections",
                expected="--inpaint as well",
                got=f"{self.corrections} without it",
            )

    def num_moves(self, steps: int) -> int:
        """Return how often each sample moves."""
        return steps + (
            (steps - 1) * (9 if self.corrections is None else self.corrections)
            if self.inpaint
            else 0
        )

    def read(self, spec: "DataSpec", num: int) -> "tuple[Tensor, Tensor | None] | None":
        """Read the images, one for each of `num` samples, and the mask of an inpainting, true where images are known.

        Raises:
            MissingFileError: no such file.
            DataError: a file that is not one of images of the plan's shape.
            SetupError: another number of images than of samples.
        """
        file = self.init or self.inpaint
        if file is None:
            return None
        from ddm.images.samples import read_given_images, read_mask

        images = read_given_images(file, spec)
        if len(images) not in (1, num):
            flag = "--init" if self.init else "--inpaint"
            raise SetupError(
                flag,
                expected=f"1 image, or one for each of {num} samples",
                got=f"{len(images)} images",
            )
        images = images.expand(num, *images.shape[1:])
        return images, None if self.mask is None else ~read_mask(self.mask, spec)

    def draw(
        self, ensemble: "Ensemble", num: int, read: "tuple[Tensor, Tensor | None] | None", how: Any
    ) -> "Samples":
        """Draw samples, from noise or from what was read."""
        from ddm.sampling.options import sampling_keywords

        how = sampling_keywords(how)
        if read is None:
            return ensemble.sample(num, **how)
        images, known = read
        if known is None:
            return ensemble.image_to_image(images, self.t_start or 1.0, **how)
        if self.corrections is not None:
            how["corrections"] = self.corrections
        return ensemble.inpaint(images, known, **how)


FROM_NOISE = Editing(None, None, None, None, None)


def interval(text: str | None) -> tuple[float, float]:
    """Read the value of --set guidance-interval.

    Raises:
        SetupError: not two times.
    """
    if text is None:
        return (0.0, 1.0)
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low < high <= 1:
        expected = "LOW,HIGH, two times with 0 <= LOW < HIGH <= 1"
        raise SetupError("--set guidance-interval", expected=expected, got=repr(text[:40]))
    return low, high
