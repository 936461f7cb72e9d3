"""What slow tests of installations share: the wheelhouse of this tree, and an environment made of it alone."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.installed import fill_wheelhouse, install_wheelhouse, python_for_everyone


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make wheelhouse` leaves it."""
    return fill_wheelhouse(tmp_path_factory.mktemp("wheels") / "wheelhouse")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may pass through; pytest closes its own ones again and again.

    Not below /tmp, where a container has a folder of its own, in which it may write.
    """
    parent = "/srv" if os.access("/srv", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="archipelago-", dir=parent))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def installed_for_everyone(wheelhouse: Path, open_folder: Path) -> Path:
    """The programs of an environment that the wheelhouse alone has filled, and that every user may execute."""
    python = python_for_everyone()
    if python is None:
        pytest.skip("no Python here that other users may execute")
    result = install_wheelhouse(wheelhouse, open_folder / "environment", python)
    assert result.returncode == 0, result.stdout + result.stderr
    return open_folder / "environment" / "bin"
