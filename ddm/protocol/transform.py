"""How every silo, and the aggregator, turn a decoded picture into samples. A part of the plan.

A picture that is not taken is an error among the aggregator's public images, and a blank sample at a silo.

The steps have one order: channels, range, content, slices, fit, storage. `ddm.images.transform` carries them out.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.base import Model, Unit
from ddm.protocol.data import DataSpec, PixelValue

Level = Annotated[float, Field(ge=-1e9, le=1e9)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]
Part = Annotated[float, Field(ge=0.0, le=1.0)]
# The largest finite number of the type.
_MAX_FLOAT16 = 65504.0


def _check_ascends(subject: str, low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"{subject} must ascend, got {low:g} to {high:g}")


class WindowRange(Model):
    """The window that a file asks to be shown in, as DICOM's VOI window, becomes the plan's range; clipped beyond.

    Attributes:
        fallback: what becomes of a picture without a window: it is not taken (`refuse`), or its 0.5th to 99.5th
            percentile or its type's full range is.
    """

    kind: Literal["window"] = "window"
    # A silo makes a blank sample of a picture that is not taken: how many samples there are must not depend on private
    # images in any way that a plan can choose (docs/adr/0064).
    fallback: Literal["refuse", "percentiles", "full"] = "refuse"


class ValuesRange(Model):
    """Two given values, in units of the file (Hounsfield units of CT), become the ends of the plan's range.

    Attributes:
        low: becomes the lower end.
        high: becomes the upper end.
    """

    kind: Literal["values"] = "values"
    low: Level
    high: Level

    @model_validator(mode="after")
    def _ascends(self) -> "ValuesRange":
        _check_ascends("range.low and range.high", self.low, self.high)
        return self


class PercentilesRange(Model):
    """Two percentiles of a picture's values, all channels together, become the ends of the plan's range.

    Attributes:
        low: becomes the lower end, percent.
        high: becomes the upper end, percent.
    """

    kind: Literal["percentiles"] = "percentiles"
    low: Percent = 0.5
    high: Percent = 99.5

    @model_validator(mode="after")
    def _ascends(self) -> "PercentilesRange":
        _check_ascends("range.low and range.high", self.low, self.high)
        return self


class FullRange(Model):
    """All that the file's type can hold, 0 to 255 of 8 bits, becomes the plan's range."""

    kind: Literal["full"] = "full"


Range = Annotated[
    WindowRange | ValuesRange | PercentilesRange | FullRange, Field(discriminator="kind")
]


class Content(Model):
    """Cuts a picture to the box of what is brighter than a threshold, before anything else of its geometry.

    Attributes:
        threshold: as a share of the plan's range.
        margin: kept around the box on each side, as a share of the box.
    """

    threshold: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    margin: Part = 0.0


class Slices(Model):
    """Makes images of volumes: slices at even distances, upright as on a screen; the patients are the units.

    Attributes:
        axis: across which they are taken: axial from inferior to superior, coronal from anterior to posterior,
            sagittal from the patient's right to the left.
        count: how many of each volume; one with fewer gives some more than once, and an image is taken as often.
        share: the part of the axis that they are taken from, 0 to 1.
    """

    axis: Literal["axial", "coronal", "sagittal"] = "axial"
    count: Annotated[int, Field(gt=0, le=4096)]
    share: tuple[Part, Part] = (0.0, 1.0)

    @model_validator(mode="after")
    def _ascends(self) -> "Slices":
        _check_ascends("slices.share", *self.share)
        return self


class CropFit(Model):
    """Resampled in proportion until no side is shorter than the plan's; the middle is kept."""

    kind: Literal["crop"] = "crop"


class PadFit(Model):
    """Resampled in proportion until no side is longer than the plan's; what is missing is padded on both sides."""

    kind: Literal["pad"] = "pad"


class StretchFit(Model):
    """Each side is resampled to the plan's separately; proportions are lost."""

    kind: Literal["stretch"] = "stretch"


class CentreFit(Model):
    """Not resampled: the middle is kept of sides that are too long, and sides that are too short are padded."""

    kind: Literal["centre"] = "centre"


class SpacingFit(Model):
    """Resampled to one spacing, so that sizes stay comparable between patients; then as `centre`.

    A picture whose file states no spacing is not taken.

    Attributes:
        mm: between neighbours.
    """

    kind: Literal["spacing"] = "spacing"
    mm: Annotated[float, Field(ge=0.001, le=1000.0)]


Fit = Annotated[CropFit | PadFit | StretchFit | CentreFit | SpacingFit, Field(discriminator="kind")]


class TransformSpec(Model):
    """What becomes of every picture, at each silo and at the aggregator, before anything else sees it.

    Attributes:
        channels: `keep`, which takes no pictures with another number than the plan's; `grey`, the luminance of RGB;
            `rgb`, grey three times; or `pick`, those that are listed.
        pick: of `pick`, the channels to take, from 0, in this order.
        padding: the value that is padded with, in the plan's range; by default its lower end.
        storage: the type of the silo's copy on disk; of whole numbers all are spread over the plan's range.
    """

    channels: Literal["keep", "grey", "rgb", "pick"] = "keep"
    pick: Annotated[tuple[Annotated[int, Field(ge=0, le=65535)], ...], Field(max_length=64)] = ()
    # Common to all silos: experts are mixed at the same x_t, so that equal anatomy must have equal values
    # (docs/adr/0036).
    range: Range = PercentilesRange()
    content: Content | None = None
    slices: Slices | None = None
    fit: Fit = CropFit()
    padding: PixelValue | None = None
    storage: Literal["uint8", "uint16", "float16"] = "uint16"

    @model_validator(mode="after")
    def _picks_where_it_says_so(self) -> "TransformSpec":
        if (self.channels == "pick") != bool(self.pick):
            raise ValueError(
                'transform.pick lists channels where transform.channels is "pick", and only there'
            )
        return self

    def misfit(self, data: DataSpec, unit: Unit | None = None) -> str | None:
        """Return what the transform needs and `data` or the unit of noised statistics are not, if anything."""
        num_channels = data.shape[0]
        made_channels = {"grey": 1, "rgb": 3, "keep": num_channels, "pick": len(self.pick)}
        if made_channels[self.channels] != num_channels:
            return f"{made_channels[self.channels]} channels in data.shape, not {num_channels}"
        if self.slices and len(data.shape) != 3:
            return (
                f"images (C, H, W) in data.shape, which slices are, not {len(data.shape)} numbers"
            )
        # The slices of one volume show one patient: noise for one of them would hide a part of that patient only.
        if self.slices and unit == "image":
            return 'statistics.unit = "patient" for its slices, which are not records of their own'
        low, high = data.range
        if self.storage == "float16" and max(-low, high) > _MAX_FLOAT16:
            return f"data.range within {-_MAX_FLOAT16:g} to {_MAX_FLOAT16:g}, which float16 holds"
        if self.padding is not None and not low <= self.padding <= high:
            return f"padding within data.range, {low:g} to {high:g}, not {self.padding:g}"
        return None

    @property
    def words(self) -> tuple[str, ...]:
        """What it does, step by step, in words for people."""
        steps = [
            _channels_in_words(self),
            _range_in_words(self.range),
            _content_in_words(self.content),
            _slices_in_words(self.slices),
            _fit_in_words(self.fit),
        ]
        if self.padding is not None:
            steps.append(f"padded with {self.padding:g}")
        steps.append(f"kept as {self.storage}")
        return tuple(step for step in steps if step)


def _channels_in_words(spec: TransformSpec) -> str:
    match spec.channels:
        case "keep":
            return ""
        case "grey":
            return "grey by luminance"
        case "rgb":
            return "grey repeated as RGB"
        case "pick":
            return f"channels {', '.join(map(str, spec.pick))}"


def _range_in_words(value_range: WindowRange | ValuesRange | PercentilesRange | FullRange) -> str:
    match value_range:
        case WindowRange(fallback=fallback):
            without = {
                "refuse": "not taken",
                "percentiles": "by percentiles 0.5 to 99.5",
                "full": "by the type's range",
            }
            return f"range by the file's window (without one: {without[fallback]})"
        case ValuesRange(low=low, high=high):
            return f"range from {low:g} to {high:g} in units of the file"
        case PercentilesRange(low=low, high=high):
            return f"range from percentile {low:g} to {high:g}"
        case FullRange():
            return "range of the file's type"


def _content_in_words(content: Content | None) -> str:
    if content is None:
        return ""
    text = f"cut to what is brighter than {content.threshold:.3g} of the range"
    if content.margin:
        text += f" and a margin of {content.margin:.0%}"
    return text


def _slices_in_words(slices: Slices | None) -> str:
    if slices is None:
        return ""
    low, high = slices.share
    part = f"from {low:.0%} to {high:.0%} of the axis"
    return f"{slices.count} {slices.axis} slices of a volume, {part}"


def _fit_in_words(fit: CropFit | PadFit | StretchFit | CentreFit | SpacingFit) -> str:
    match fit:
        case CropFit():
            return "resampled in proportion until no side is too short, the middle kept"
        case PadFit():
            return "resampled in proportion until no side is too long, padded on both sides"
        case StretchFit():
            return "each side stretched to the plan's"
        case CentreFit():
            return "not resampled, the middle kept, short sides padded"
        case SpacingFit(mm=mm):
            return f"resampled to {mm:g} mm, the middle kept, short sides padded"
