"""Write the pages that come from the code: four in docs/reference, the page on sizing, and the list of decisions."""

from pathlib import Path

from tools.reference.api import api_page
from tools.reference.decisions import decisions_page
from tools.reference.plan_life import plan_life_page
from tools.reference.recipe import recipe_page
from tools.reference.remedies import remedies_page
from tools.reference.sizing import sizing_page

FOLDER = Path(__file__).parent.parent.parent / "docs"
PAGES = {
    "adr/README.md": decisions_page,
    "explanation/sizing.md": sizing_page,
    "reference/api.md": api_page,
    "reference/plan-life.md": plan_life_page,
    "reference/recipe.md": recipe_page,
    "reference/remedies.md": remedies_page,
}
