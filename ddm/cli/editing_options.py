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

DEFAULT_CORRECTIONS = 9  # as `Ensemble.inpaint` has it

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
        help="With --init: time to which they are noised; 1 leaves nothing of them.",
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
        help="With --inpaint: mask, white where the model draws, black where it does not.",
        rich_help_panel=WHAT,
    ),
]


@dataclass(frozen=True)
class EditingFiles:
    """The options that name images to begin from."""

    init: InitOption = None
    t_start: TStartOption = None
    inpaint: InpaintOption = None
    mask: MaskOption = None


@dataclass(frozen=True)
class EditingOptions:
    """Images to begin from; everything None for samples from noise.

    Args:
        init: the file of images to vary.
        t_start: how far they are noised.
        inpaint: the file of images to complete.
        mask: the file that says where.
        corrections: how many after each step of an inpainting; None for the default.

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
        for first_flag, first, second_flag, second in pairs:
            if first is not None and second is None:
                raise _needs(first_flag, second_flag)
            if first is None and second is not None:
                raise _needs(second_flag, first_flag)
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
        if not self.inpaint:
            return steps
        corrections = self.corrections
        if corrections is None:
            corrections = DEFAULT_CORRECTIONS
        # There is nothing to correct after the last step.
        return steps + (steps - 1) * corrections

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
        # One image may be the beginning of all samples; `expand` repeats it without memory.
        images = images.expand(num, *images.shape[1:])
        if self.mask is None:
            return images, None
        # The file is white where to draw, and the sampler needs the opposite: where images are known.
        return images, ~read_mask(self.mask, spec)

    def draw(
        self,
        ensemble: "Ensemble",
        num: int,
        begin: "tuple[Tensor, Tensor | None] | None",
        how: dict[str, Any],
    ) -> "Samples":
        """Draw samples, from noise or from images that `read` returned."""
        from ddm.sampling.options import sampling_keywords

        how = sampling_keywords(how)
        if begin is None:
            return ensemble.sample(num, **how)
        images, known = begin
        if known is None:
            # `__post_init__` refuses --init without --t-start, so that the time is there.
            return ensemble.image_to_image(images, self.t_start or 1.0, **how)
        if self.corrections is not None:
            how["corrections"] = self.corrections
        return ensemble.inpaint(images, known, **how)


def _needs(flag: str, missing_flag: str) -> SetupError:
    return SetupError(flag, expected=f"{missing_flag} as well", got=f"{flag} alone")


FROM_NOISE = EditingOptions(init=None, t_start=None, inpaint=None, mask=None, corrections=None)


def read_interval(text: str | None) -> tuple[float, float]:
    """Read the value of --set guidance-interval.

    Raises:
        SetupError: not two times.
    """
    if text is None:
        return (0.0, 1.0)
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise _no_interval(text) from error
    if not 0 <= low < high <= 1:
        raise _no_interval(text)
    return low, high


def _no_interval(text: str) -> SetupError:
    return SetupError(
        "--set guidance-interval",
        expected="LOW,HIGH, two times with 0 <= LOW < HIGH <= 1",
        got=repr(text[:40]),
    )
