"""The site of the documentation: it builds without a warning, needs no network, and has every section."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ddm.system.version import installed_version
from tools.site.navigation import ROOT, SECTIONS


class LoadedFiles(HTMLParser):
    """Everything that a page makes a browser load: scripts, styles, pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
        for name, value in attributes:
            if names.get(tag) == name and value:
                self.addresses.append(value)


def loaded_files(text: str) -> list[str]:
    """Return the addresses that a page loads."""
    parser = LoadedFiles()
    parser.feed(text)
    return parser.addresses


def foreign_addresses(text: str) -> list[str]:
    """Return the addresses of other hosts that a page loads."""
    return [address for address in loaded_files(text) if re.match(r"(?:[a-z]+:)?//", address)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once; a warning of Sphinx ends the build with an error."""
    folder = tmp_path_factory.mktemp("build") / "site"
    build = subprocess.run(
        [sys.executable, "-m", "tools.site", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return folder


def test_a_script_from_elsewhere_is_noticed() -> None:
    page = '<script src="https://example.org/a.js"></script><script src="a.js"></script>'
    assert foreign_addresses(page) == ["https://example.org/a.js"]


@pytest.mark.slow
def test_pages_load_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(SECTIONS)
    for page in pages:
        assert not foreign_addresses(page.read_text("utf-8")), page.name
    for style in site.rglob("*.css"):
        text = style.read_text("utf-8")
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", text), style.name


@pytest.mark.slow
def test_every_version_has_a_folder_with_pages_and_a_search(site: Path) -> None:
    version = installed_version()
    assert f'href="{version}/index.html"' in (site / "index.html").read_text("utf-8")
    index = (site / version / "searchindex.js").read_text("utf-8")
    for section in SECTIONS:
        assert f'"{section.removesuffix(".md")}"' in index
    home = (site / version / "docs" / "README.html").read_text("utf-8")
    for section in SECTIONS:
        name = Path(section).stem
        assert f'href="{name}.html"' in home
    silo = (site / version / "docs" / "how-to" / "run-a-silo.html").read_text("utf-8")
    assert 'href="../reference/policy.html"' in silo
