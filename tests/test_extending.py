"""Each change that docs/explanation/extending.md shows is applied to a copy of the packages, and its example runs."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.forked import fork_process, wait_for_exit

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "extending.md"
COPIED = ("ddm", "silo", "aggregator", "tests/support")


def sections() -> dict[str, str]:
    """The sections of the page that show a change, by title."""
    titled = re.split(r"^## (.+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    texts = dict(zip(titled[::2], titled[1::2], strict=True))
    return {title: text for title, text in texts.items() if "```diff" in text}


def block(text: str, language: str) -> str:
    """The one block of a section in a language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return str(block)


def copy_of_the_packages(folder: Path) -> Path:
    # With their bytecode, so that only what the change touches is compiled.
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    # Without it the folder is no package, and one of this name that is installed would be imported.
    shutil.copy(ROOT / "tests" / "__init__.py", folder / "tests")
    return folder


def run_example(code: str, copy: Path) -> None:
    """Run code that imports the packages of a copy, in a process that has imported those of this tree and their needs.

    That saves the import of torch.
    """
    packages = {name.split("/")[0] for name in COPIED}
    for module in list(sys.modules):
        if module.split(".")[0] in packages:
            del sys.modules[module]
    sys.path.insert(0, str(copy))
    warnings.simplefilter("ignore")
    assert str(importlib.import_module("ddm").__file__).startswith(str(copy))
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("title", sections())
def test_change_that_the_page_shows_applies_and_its_example_runs(
    title: str, tmp_path: Path
) -> None:
    text = sections()[title]
    copy = copy_of_the_packages(tmp_path / "copy")
    apply = ["git", "apply", "--recount", "-"]
    # Outside of a repository, so that git changes files of the copy and nothing else.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    applied = subprocess.run(
        apply,
        input=block(text, "diff"),
        cwd=copy,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert applied.returncode == 0, applied.stderr
    pid = fork_process(lambda: run_example(block(text, "python"), copy))
    assert wait_for_exit(pid) == 0, "see the output of the forked process"


def test_page_counts_the_files_that_each_change_touches() -> None:
    page = PAGE.read_text("utf-8")
    stated = dict(re.findall(r"^\| (an? [a-z ]+) \| (\d+)", page, flags=re.MULTILINE))
    for title, text in sections().items():
        touched = re.findall(r"^diff --git", block(text, "diff"), flags=re.MULTILINE)
        assert stated[title[0].lower() + title[1:]] == str(len(touched)), title
