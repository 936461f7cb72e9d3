"""Settings of Sphinx for the site; `python -m tools.site` builds it.

The source is the repository as it is, so that a link between two pages works there and on the site.
"""

import posixpath

from sphinx.application import Sphinx

from ddm.system.version import installed_version
from tools.site.navigation import ROOT, navigation_of
from tools.site.notebooks import notebook_as_page

project = "Archipelago"
version = installed_version()
release = version
root_doc = "docs/README"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["docs/**.md", "examples/*/README.md", "examples/notebooks/*.ipynb", "*.md"]
# Folders without pages, some of them large, which Sphinx would search through.
exclude_patterns = [".*", "build", "tests", "ddm", "silo", "aggregator", "tools"]

# As the repository's own pages have them, down to the deepest heading.
myst_heading_anchors = 4
suppress_warnings = [
    # A decision record has no place in the navigation: one list links all of them.
    "toc.not_included",
]

html_theme = "furo"
html_title = f"Archipelago {version}"
html_show_copyright = False
# The pages are shown as HTML only.
html_copy_source = False
html_show_sourcelink = False


def prepare_page(app: Sphinx, document: str, source: list[str]) -> None:
    """Turn a notebook into a page, and add the pages that a section lists to the navigation."""
    page = posixpath.relpath(app.env.doc2path(document), ROOT)
    if page.endswith(".ipynb"):
        source[0] = notebook_as_page(source[0])
    source[0] += navigation_of(page, source[0])


def setup(app: Sphinx) -> None:
    """Tell Sphinx what to call."""
    app.connect("source-read", prepare_page)
