"""`make site`: build the documentation of this version into build/site/VERSION; a warning is an error.

    python -m tools.site [FOLDER]

The site needs no network: styles, fonts and scripts are part of it, and the search runs in the browser.
"""

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from ddm.system.version import installed_version
from tools.site.navigation import ROOT

_REDIRECT = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Archipelago</title>
<meta http-equiv="refresh" content="0; url={target}">
<p><a href="{target}">Documentation of Archipelago</a></p>
</html>
"""
_VERSIONS = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Archipelago</title>
<h1>Documentation of Archipelago</h1>
<ul>
{items}
</ul>
</html>
"""


def build_site(folder: Path) -> int:
    """Build the site of this version, and the list of all versions in the folder.

    Args:
        folder: gets a folder for this version; those of other versions stay.

    Returns:
        Sphinx's exit status: 0 where there was no warning.
    """
    version_folder = folder / installed_version()
    options = ["-b", "html", "-j", "auto", "-W", "--keep-going", "-q"]
    if not (version_folder / "searchindex.js").is_file():
        # After a build that was stopped, Sphinx would put only the pages that changed since into the search's index.
        options.append("-a")
    status = build_main(
        [
            *options,
            "-c",
            str(ROOT / "tools" / "site"),
            # What Sphinx has parsed, so that the next build reads only the pages that changed.
            "-d",
            str(folder.parent / "site-cache"),
            str(ROOT),
            str(version_folder),
        ]
    )
    if status != 0:
        return status
    (version_folder / "index.html").write_text(_REDIRECT.format(target="docs/README.html"), "utf-8")
    items = []
    for index in sorted(folder.glob("*/index.html")):
        name = index.parent.name
        items.append(f'<li><a href="{name}/index.html">{name}</a></li>')
    (folder / "index.html").write_text(_VERSIONS.format(items="\n".join(items)), "utf-8")
    return 0


if __name__ == "__main__":
    target = ROOT / "build" / "site"
    if len(sys.argv) > 1:
        target = Path(sys.argv[1])
    sys.exit(build_site(target))
