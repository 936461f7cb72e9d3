"""An SVG of boxes, arrows and text, in pixels of the page that shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Of equal width on Linux, macOS and Windows, so that text which fits its box here fits it everywhere.
FONT = "DejaVu Sans, Verdana, sans-serif"
FONT_OF_CODE = "DejaVu Sans Mono, Menlo, Consolas, monospace"
INK = "#1b2733"
TEXT_SIZE = 12
LINE_HEIGHT = 17

Point = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """The colours of a box: of its surface, its border, and of arrows of the same meaning."""

    fill: str
    stroke: str


# Told apart by colour-blind people as well, by lightness of the border and by the words in the boxes.
PRIVATE = Style("#dcebfa", "#1f5f99")
LEAVING = Style("#fde6cf", "#b3530a")
SIGNED = Style("#dff3e4", "#1d7a43")
PERSON = Style("#ece4f8", "#6a3fa0")
PLAIN = Style("#f1f3f5", "#6b7680")


@dataclass(frozen=True)
class Box:
    """A rectangle: its left upper corner and its size, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> Point:
        """The middle of the left side."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> Point:
        """The middle of the right side."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> Point:
        """The middle of the upper side."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> Point:
        """The middle of the lower side."""
        return self.x + self.width / 2, self.y + self.height


class Drawing:
    """Collects shapes in the order in which they cover each other; `svg` writes them."""

    def __init__(self, width: int, height: int, description: str) -> None:
        """Begin with a white sheet, since a page may be dark.

        Args:
            width: in pixels.
            height: in pixels.
            description: what a screen reader says.
        """
        self._width = width
        self._height = height
        self._description = description
        self._shapes: list[str] = []
        self._shapes.append(f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>')

    def box(
        self,
        box: Box,
        style: Style,
        heading: str,
        lines: Sequence[str] = (),
        *,
        heading_is_code: bool = False,
    ) -> None:
        """Draw a filled box with a bold heading and lines below it, all centred."""
        self._rectangle(box, style.fill, style.stroke)
        centre = box.x + box.width / 2
        num_lines = 1 + len(lines)
        # The first base line, so that all lines together have their middle in the box's.
        y = box.y + box.height / 2 - (num_lines - 1) * LINE_HEIGHT / 2 + 4
        self.text((centre, y), heading, bold=True, code=heading_is_code)
        for line in lines:
            y += LINE_HEIGHT
            self.text((centre, y), line)

    def area(self, box: Box, style: Style, heading: str) -> None:
        """Draw a dashed frame around other boxes, with a heading in its left upper corner."""
        self._rectangle(box, "none", style.stroke, dashed=True)
        self.text((box.x + 10, box.y + 18), heading, anchor="start", colour=style.stroke, bold=True)

    def arrow(self, points: Sequence[Point], style: Style, *, dashed: bool = False) -> None:
        """Draw a line through the points, with a head at the last one."""
        self._line([*points[:-1], _shortened(points[-2], points[-1])], style.stroke, dashed)
        self._head(points[-2], points[-1], style.stroke)

    def line(self, points: Sequence[Point], style: Style, *, dashed: bool = False) -> None:
        """Draw a line through the points, without a head."""
        self._line(points, style.stroke, dashed)

    def text(
        self,
        position: Point,
        words: str,
        *,
        anchor: str = "middle",
        colour: str = INK,
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """Write one line; the position is that of its base line's start, middle or end, by the anchor."""
        x, y = position
        font = FONT_OF_CODE if code else FONT
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-family="{font}" font-size="{TEXT_SIZE}"'
            f'{weight} fill="{colour}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """Return the whole file."""
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height}" '
            f'viewBox="0 0 {self._width} {self._height}" role="img">\n'
            f"<title>{escape(self._description)}</title>\n{shapes}\n</svg>\n"
        )

    def _rectangle(self, box: Box, fill: str, stroke: str, *, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        self._shapes.append(
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="5" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dashes}/>'
        )

    def _line(self, points: Sequence[Point], stroke: str, dashed: bool) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        places = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="2"{dashes}/>'
        )

    def _head(self, before: Point, tip: Point, colour: str) -> None:
        """A triangle at the tip; arrows end along one of the axes."""
        x, y = tip
        step_x, step_y = _direction(before, tip)
        back_x = x - 9 * step_x
        back_y = y - 9 * step_y
        corners = (
            (x, y),
            (back_x - 5 * step_y, back_y + 5 * step_x),
            (back_x + 5 * step_y, back_y - 5 * step_x),
        )
        places = " ".join(f"{corner_x:g},{corner_y:g}" for corner_x, corner_y in corners)
        self._shapes.append(f'<polygon points="{places}" fill="{colour}"/>')


def _direction(before: Point, tip: Point) -> Point:
    """The unit vector from one point to another one that is level with it or right above or below it."""
    along_x = tip[0] - before[0]
    along_y = tip[1] - before[1]
    length = abs(along_x) + abs(along_y)
    return along_x / length, along_y / length


def _shortened(before: Point, tip: Point) -> Point:
    """Where the line ends under its head, so that it does not blunt the tip."""
    step_x, step_y = _direction(before, tip)
    return tip[0] - 6 * step_x, tip[1] - 6 * step_y
