"""Write the references that come from the code: docs/reference/api.md and docs/reference/recipe.md."""

from pathlib import Path

from tools.reference.api import api_page
from tools.reference.recipe import recipe_page

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reference"
PAGES = {"api.md": api_page, "recipe.md": recipe_page}
