"""Draw the diagrams and badges of the documentation: SVG files in docs/pictures, the same bytes each time."""

from pathlib import Path

from tools.pictures.badges import licence_badge, maturity_badge, python_badge, tests_badge
from tools.pictures.data_flow import data_flow_picture
from tools.pictures.plan_life import plan_life_picture
from tools.pictures.signatures import signatures_picture

FOLDER = Path(__file__).parent.parent.parent / "docs" / "pictures"
PICTURES = {
    "badge-gpu.svg": maturity_badge,
    "badge-licence.svg": licence_badge,
    "badge-python.svg": python_badge,
    "badge-tests.svg": tests_badge,
    "data-flow.svg": data_flow_picture,
    "plan-life.svg": plan_life_picture,
    "signatures.svg": signatures_picture,
}
