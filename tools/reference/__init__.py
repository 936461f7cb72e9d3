"""Write the references that come from the code: api.md, plan-life.md, recipe.md and remedies.md in docs/reference."""

from pathlib import Path

from tools.reference.api import api_page
from tools.reference.plan_life import plan_life_page
from tools.reference.recipe import recipe_page
from tools.reference.remedies import remedies_page

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reference"
PAGES = {
    "api.md": api_page,
    "plan-life.md": plan_life_page,
    "recipe.md": recipe_page,
    "remedies.md": remedies_page,
}
