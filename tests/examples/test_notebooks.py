"""The notebooks of examples/notebooks: they run from the first cell to the last, and show what they promise."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.loading.release import open_release
from tests.support.case import case
from tests.support.notebook import read_cells

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURE = "image/png"
TABLE = "text/html"
# A student reads a cell without scrolling.
MAX_LINES = 40


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the folder, without what somebody's runs left in it."""
    folder = tmp_path / "examples" / "notebooks"
    folder.mkdir(parents=True)
    for path in (*NOTEBOOKS, FOLDER / "islands.toml"):
        shutil.copy(path, folder)
    return folder


def run(folder: Path, name: str) -> list[list[str]]:
    """Run a notebook in a process of its own; return the MIME types that each cell displayed."""
    environment = {
        **os.environ,
        "IPYTHONDIR": str(folder.parent / "ipython"),
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder.parent / "state"),
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.notebook", name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    displayed: list[list[str]] = json.loads(result.stdout.splitlines()[-1])
    return displayed


def num_showing(displayed: list[list[str]], mime_type: str) -> int:
    """Return how many cells displayed something of this type."""
    return sum(mime_type in types for types in displayed)


def test_notebook_has_no_outputs_short_cells_and_a_name_for_each() -> None:
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        with case(notebook=notebook.name):
            cells = read_cells(notebook)
            for cell in cells:
                assert not cell.get("outputs") and not cell.get("execution_count")
                assert len(cell["source"]) <= MAX_LINES
                assert not re.search(r"(?:/home|/root|/work|/Users)/", "".join(cell["source"]))
            assert len({cell["id"] for cell in cells}) == len(cells)
            assert cells[0]["source"][0].startswith("# ")


@pytest.mark.slow
def test_islands_become_a_release_that_the_next_notebook_opens(copied: Path) -> None:
    displayed = run(copied, "islands.ipynb")
    assert num_showing(displayed, PICTURE) == 3
    # Verified once more, from outside of the notebook.
    root = copied / "islands" / "run" / "1.root.json"
    release = open_release(copied / "islands" / "release", root=root, state=None)
    assert len(release.manifest.experts) == 3

    displayed = run(copied, "sample-and-edit.ipynb")
    assert num_showing(displayed, PICTURE) == 5
    assert num_showing(displayed, TABLE) == 3
    assert (copied / "samples.png").is_file()


def test_parts_of_ones_own_form_ensembles_that_show_their_samples(copied: Path) -> None:
    displayed = run(copied, "bring-your-own.ipynb")
    assert num_showing(displayed, PICTURE) == 4
    assert num_showing(displayed, TABLE) == 2


@pytest.mark.slow
def test_notebook_on_sampling_makes_a_release_where_there_is_none(copied: Path) -> None:
    assert num_showing(run(copied, "sample-and-edit.ipynb"), PICTURE) == 5


def test_control_a_cell_or_a_command_that_fails_fails_the_notebook(tmp_path: Path) -> None:
    for source in ("1 / 0", "!exit 3"):
        with case(source=source):
            cell = {"cell_type": "code", "id": "wrong", "source": [source]}
            (tmp_path / "wrong.ipynb").write_text(json.dumps({"cells": [cell]}), "utf-8")
            with pytest.raises(AssertionError, match="ZeroDivisionError|cell wrong failed"):
                run(tmp_path, "wrong.ipynb")
