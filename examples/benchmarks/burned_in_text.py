"""Measures the search for burned-in text: recall on text drawn into radiographs, and alarms on those without any.

python examples/benchmarks/burned_in_text.py --data FOLDER --samples 100
python examples/benchmarks/burned_in_text.py --data FOLDER --against before.py    # another text.py beside it

Nothing of the images is printed but counts. Images are enlarged, or shrunk, to the sides that are measured; to those
that are enlarged more than once and a half, noise is added, since an enlarged image has none of its own.
"""

import argparse
import importlib.util
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ddm.evaluation.intervals import wilson
from ddm.images.text import suspect_text

Detector = Callable[[NDArray[np.generic]], bool]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SIDES = (128, 256, 512, 1024)  # pixels, of the longer side
HEIGHTS = (5, 6, 7, 8, 10, 14, 20, 28, 40)  # pixels, of a capital letter
KINDS = ("date", "name", "identifier")
CONTRASTS = (
    "white",
    "white on a black box",
    "outlined",
    "dark on light",
    "grey, 30% of the range",
    "grey, 20%",
)
PLACES = ("corner", "over anatomy")
_MARGIN = 0.02  # of the side, between a corner and its text
_NOISE = 2.5  # grey levels
_MOST_BEHIND_WHITE = 190  # grey level; on more, nobody reads white letters
_TRIES = 20  # places
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_SURNAMES = (
    "Schmidt",
    "Nowak",
    "Garcia",
    "Martin",
    "Rossi",
    "Jensen",
    "Kowalska",
    "Smith",
    "Meyer",
    "Dupont",
    "Silva",
)
_NAMES = (
    "Anna",
    "Erika",
    "Jonas",
    "Maria",
    "Peter",
    "Lucas",
    "Sofia",
    "Emma",
    "Paul",
    "Ingrid",
    "Tom",
)
_MATPLOTLIB = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSerif",
    "cmr10",
    "STIXGeneral",
    "Pillow",
)
_BITMAP_FONT = "Pillow's bitmap"  # of one size: capitals of 8 pixels, without grey edges
_BITMAP_HEIGHT = 8


@dataclass(frozen=True)
class Drawing:
    """How one text is drawn.

    Attributes:
        side: of the image, pixels.
        height: of a capital letter, pixels.
        kind: what the text is.
        contrast: how it stands out.
        place: where it stands.
        font: its letters.
    """

    side: int
    height: int
    kind: str
    contrast: str
    place: str
    font: str


def load_images(folder: Path, num: int | None, without: Sequence[str] = ()) -> list[Image.Image]:
    """Load grey images in the order of their names, but for those whose name begins with one of these texts."""
    paths = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg")
    )
    paths = [path for path in paths if not path.name.startswith(tuple(without))]
    return [Image.open(path).convert("L") for path in paths[:num]]


def resized(image: Image.Image, side: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return an image whose longer side has this length, with the noise that enlarging cannot make."""
    factor = side / max(image.size)
    size = (round(image.width * factor), round(image.height * factor))
    grey = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    if factor <= 1.5:
        return grey
    noisy = grey + generator.normal(0, _NOISE, grey.shape)
    return np.asarray(noisy.round().clip(0, 255).astype(np.uint8))


def made_text(kind: str, generator: np.random.Generator) -> str:
    """Return a text of this kind that names nobody."""
    day = int(generator.integers(1, 29))
    month = int(generator.integers(1, 13))
    year = int(generator.integers(1920, 2025))
    forms: tuple[str, ...]
    if kind == "date":
        forms = (
            f"{day:02d}.{month:02d}.{year}",
            f"{year}-{month:02d}-{day:02d}",
            f"{day:02d}/{month:02d}/{year % 100:02d}",
            f"{day:02d} {_MONTHS[month - 1]} {year}",
        )
    elif kind == "name":
        surname = str(generator.choice(_SURNAMES))
        name = str(generator.choice(_NAMES))
        forms = (
            f"{surname.upper()}, {name.upper()}",
            f"{surname}, {name}",
            f"{name} {surname}",
            f"{surname}^{name}",
        )
    else:
        number = int(generator.integers(10**6, 10**8))
        forms = (
            f"{number:08d}",
            f"ID {number}",
            f"PID:{number % 10**6:06d}",
            f"A{number % 10**7:07d}",
            f"#{number}",
        )
    return str(generator.choice(forms))


def font_of(name: str, height: int) -> Font:
    """Return a font whose capitals have this height."""
    if name == _BITMAP_FONT:
        return ImageFont.load_default_imagefont()
    for size in range(height, 3 * height):
        if name == "Pillow":
            font = ImageFont.load_default(size)
        else:
            font = ImageFont.truetype(_MATPLOTLIB / f"{name}.ttf", size)
        _, top, _, bottom = font.getbbox("H")
        if bottom - top >= height:
            return font
    raise ValueError(f"no size of {name} has capitals of {height} pixels")


def draw(
    values: NDArray[np.uint8], drawing: Drawing, text: str, generator: np.random.Generator
) -> Image.Image | None:
    """Draw a text into an image; None where it does not fit, or where nobody could read it."""
    image = Image.fromarray(values)
    font = font_of(drawing.font, drawing.height)
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = (round(edge) for edge in pen.textbbox((0, 0), text, font=font))
    width = right - left
    height = bottom - top
    margin = max(2, round(_MARGIN * drawing.side))
    free_width = image.width - width - 2 * margin
    free_height = image.height - height - 2 * margin
    if free_width < 0 or free_height < 0:
        return None
    for _ in range(_TRIES):
        if drawing.place == "corner":
            x = margin + int(generator.integers(2)) * free_width
            y = margin + int(generator.integers(2)) * free_height
        else:
            x = margin + int(generator.integers(free_width + 1))
            y = margin + round(free_height * float(generator.uniform(0.15, 0.85)))
        box = (
            x - margin // 2 - 1,
            y - margin // 2 - 1,
            x + width + margin // 2,
            y + height + margin // 2,
        )
        behind = float(np.asarray(image.crop(box)).mean())
        if drawing.contrast != "white" or behind <= _MOST_BEHIND_WHITE:
            break
    else:
        return None
    origin = (x - left, y - top)
    if drawing.contrast == "white":
        pen.text(origin, text, fill=255, font=font)
    elif drawing.contrast == "white on a black box":
        pen.rectangle(box, fill=0)
        pen.text(origin, text, fill=255, font=font)
    elif drawing.contrast == "outlined":
        _draw_outline(pen, origin, text, font)
        pen.text(origin, text, fill=255, font=font)
    elif drawing.contrast == "dark on light":
        pen.rectangle(box, fill=235)
        pen.text(origin, text, fill=20, font=font)
    else:
        step = 0.3 * 255 if "30%" in drawing.contrast else 0.2 * 255
        fill = behind + step if behind < 255 - step else behind - step
        pen.text(origin, text, fill=round(fill), font=font)
    return image


def _draw_outline(pen: ImageDraw.ImageDraw, origin: tuple[int, int], text: str, font: Font) -> None:
    for across in (-1, 0, 1):
        for down in (-1, 0, 1):
            pen.text((origin[0] + across, origin[1] + down), text, fill=0, font=font)


def drawings(samples: int, generator: np.random.Generator) -> Iterator[Drawing]:
    """Yield as many drawings of each side and height, all else by chance."""
    for side in SIDES:
        for height in HEIGHTS:
            fonts = [*_FONTS, _BITMAP_FONT] if height == _BITMAP_HEIGHT else _FONTS
            for _ in range(samples):
                yield Drawing(
                    side=side,
                    height=height,
                    kind=str(generator.choice(KINDS)),
                    contrast=str(generator.choice(CONTRASTS)),
                    place=str(generator.choice(PLACES)),
                    font=str(generator.choice(fonts)),
                )


class DetectionTally:
    """Counts of what was found, of how many, by name."""

    def __init__(self) -> None:
        self._found: dict[str, int] = defaultdict(int)
        self._num: dict[str, int] = defaultdict(int)

    def add(self, name: str, found: bool) -> None:
        """Count one."""
        self._num[name] += 1
        self._found[name] += found

    def __str__(self) -> str:
        return "\n".join(f"| {name} | {self.cell(name)} |" for name in self._num)

    def cell(self, name: str) -> str:
        """Return share, 95% interval and number."""
        num = self._num.get(name, 0)
        if not num:
            return "does not fit"
        low, high = wilson(self._found[name], num)
        return f"{self._found[name] / num:.2f} ({low:.2f} to {high:.2f}) of {num}"

    def share(self, name: str) -> str:
        """Return the share alone."""
        num = self._num.get(name, 0)
        return f"{self._found[name] / num:.2f}" if num else ""


def measure_recall(
    images: Sequence[Image.Image], detector: Detector, samples: int, seed: int
) -> DetectionTally:
    """Count what is found of texts that are drawn, by each property of the drawing."""
    generator = np.random.default_rng(seed)
    tally = DetectionTally()
    for drawing in drawings(samples, generator):
        image = images[int(generator.integers(len(images)))]
        values = resized(image, drawing.side, generator)
        drawn = draw(values, drawing, made_text(drawing.kind, generator), generator)
        if drawn is None:
            continue
        has_text = detector(np.asarray(drawn)[None])
        names = (
            "all",
            f"{drawing.side} x {drawing.height}",
            drawing.kind,
            drawing.contrast,
            drawing.place,
        )
        for name in (*names, drawing.font, f"side {drawing.side}", f"height {drawing.height}"):
            tally.add(name, has_text)
    return tally


def measure_alarms(images: Sequence[Image.Image], detector: Detector, seed: int) -> DetectionTally:
    """Count alarms on images without added text, and with one letter that marks a side of the body."""
    generator = np.random.default_rng(seed)
    tally = DetectionTally()
    for side in SIDES:
        for image in images:
            values = resized(image, side, generator)
            tally.add(f"side {side}, without text", detector(values[None]))
            height = int(
                generator.choice([height for height in HEIGHTS if 20 * height <= 4 * side])
            )
            drawing = Drawing(
                side, height, "marker", "white", "corner", str(generator.choice(_FONTS))
            )
            marked = draw(values, drawing, str(generator.choice(["L", "R"])), generator)
            if marked is not None:
                tally.add(f"side {side}, with L or R", detector(np.asarray(marked)[None]))
    return tally


def measure_time(images: Sequence[Image.Image], detector: Detector) -> str:
    """Return milliseconds for an image without text, by side: median and 95th percentile."""
    generator = np.random.default_rng(0)
    lines = []
    for side in SIDES:
        costs_ms = []
        for image in images[:60]:
            values = resized(image, side, generator)[None]
            start = time.process_time()
            detector(values)
            costs_ms.append(1e3 * (time.process_time() - start))
        lines.append(f"| {side} | {median(costs_ms):.2f} | {np.percentile(costs_ms, 95):.2f} |")
    return "\n".join(lines)


def load_detector(path: Path) -> Detector:
    """Load `suspect_text` of another version of `ddm/images/text.py`."""
    spec = importlib.util.spec_from_file_location("other_text", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    detector: Detector = module.suspect_text
    return detector


def report(images: Sequence[Image.Image], detector: Detector, samples: int, seed: int) -> None:
    """Print tables of Markdown."""
    recall = measure_recall(images, detector, samples, seed)
    print("| side | " + " | ".join(f"{height} px" for height in HEIGHTS) + " |")
    print("| --- " * (1 + len(HEIGHTS)) + "|")
    for side in SIDES:
        shares = [recall.share(f"{side} x {height}") for height in HEIGHTS]
        print(f"| {side} | " + " | ".join(shares) + " |")
    print(f"\n| recall | |\n| --- | --- |\n{recall}")
    print(f"\n| alarms | |\n| --- | --- |\n{measure_alarms(images, detector, seed)}")
    print(f"\n| side | ms | ms, 95% |\n| --- | --- | --- |\n{measure_time(images, detector)}")


def main() -> None:
    """Measure the present detector, and another one beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of radiographs without text, PNG or JPEG"
    )
    parser.add_argument(
        "--images", type=int, help="number of radiographs that are used; default: all"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        help="beginnings of the names of images that already contain text",
    )
    parser.add_argument(
        "--samples", type=int, default=100, help="number of drawings for each side and height"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawings")
    parser.add_argument(
        "--against", type=Path, help="another version of ddm/images/text.py, to compare with"
    )
    options = parser.parse_args()
    images = load_images(options.data, options.images, options.without)
    if options.against:
        print("## before\n")
        report(images, load_detector(options.against), options.samples, options.seed)
        print("\n## after\n")
    report(images, suspect_text, options.samples, options.seed)


if __name__ == "__main__":
    main()
