"""The pictures of the documentation: drawn ones are current, readable and complete, all are small and shown."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from silo.worker.life import STATES, TRANSITIONS
from tools.pictures import FOLDER, PICTURES, plan_life
from tools.pictures.drawing import PLAIN, Box, Drawing

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MAX_PICTURE_BYTES = 200_000
IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\)")
# A character of DejaVu Sans and of Verdana, which is as wide, takes about half of the text's size in a line of prose;
# bold ones take more.
CHARACTER_WIDTH = 0.58


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_picture_has_the_bytes_that_its_script_draws(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == PICTURES[name](), "run: make docs"


def test_every_svg_in_the_folder_is_drawn_by_the_script() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.png")), ids=lambda path: path.name)
def test_picture_of_pixels_is_small(path: Path) -> None:
    assert path.stat().st_size < MAX_PICTURE_BYTES


def test_every_picture_in_the_folder_is_shown_with_a_description() -> None:
    descriptions = {}
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for description, name in IMAGE.findall(page.read_text("utf-8")):
            descriptions.setdefault(Path(name).name, []).append(description)
    shown = {name for name, texts in descriptions.items() if all(len(text) > 10 for text in texts)}
    assert not {path.name for path in FOLDER.iterdir()} - shown


def texts_outside(svg: str) -> list[str]:
    """The texts that would cross the border of their sheet."""
    root = ElementTree.fromstring(svg)
    sheet_width = float(root.attrib["width"])
    outside = []
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        words = element.text or ""
        length = len(words) * CHARACTER_WIDTH * float(element.get("font-size", "11"))
        left = float(element.attrib["x"])
        anchor = element.get("text-anchor", "middle")
        if anchor == "middle":
            left -= length / 2
        elif anchor == "end":
            left -= length
        if left < 0 or left + length > sheet_width:
            outside.append(words)
    return outside


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_text_of_a_picture_stays_on_its_sheet(name: str) -> None:
    assert not texts_outside(PICTURES[name]())


def test_text_that_leaves_the_sheet_is_noticed() -> None:
    drawing = Drawing(100, 40, "a sheet")
    drawing.text((50, 20), "short")
    drawing.text((50, 20), "much too long for this sheet")
    assert texts_outside(drawing.svg()) == ["much too long for this sheet"]


def test_text_in_a_picture_is_written_and_not_run() -> None:
    drawing = Drawing(400, 100, "<b>")
    drawing.box(Box(0, 0, 400, 100), PLAIN, "<script>1 & 2</script>")
    assert "<script>" not in drawing.svg()
    assert "&lt;script&gt;1 &amp; 2" in drawing.svg()


def test_picture_of_a_plans_life_shows_every_state_once_and_apart_from_the_others() -> None:
    assert set(plan_life.PLACES) == set(STATES)
    boxes = sorted(
        (place[0] for place in plan_life.PLACES.values()), key=lambda box: (box.y, box.x)
    )
    for before, after in pairwise(boxes):
        assert after.y >= before.y + before.height or after.x >= before.x + before.width


def test_picture_of_a_plans_life_names_every_event_and_each_step_that_spends_epsilon() -> None:
    words = " ".join(re.findall(r">([^<]+)</text>", plan_life.plan_life_picture()))
    events = {event for _, event in TRANSITIONS}
    assert not [event for event in events if not re.search(rf"\b{event}\b", words)]
    num_spending = sum(transition.spends == "epsilon" for transition in TRANSITIONS.values())
    assert words.count("epsilon") == num_spending == 2
