"""A federation with every key at hand, a plan and a release."""

from pathlib import Path

import pytest

from tests.support.federation_keys import KeyedFederation


@pytest.fixture(scope="session")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> KeyedFederation:
    return KeyedFederation.published(tmp_path_factory.mktemp("keyed"))


@pytest.fixture
def keyed(founded_once: KeyedFederation, tmp_path: Path) -> KeyedFederation:
    """A federation of this test's own, with a plan and a release, `first`."""
    return founded_once.copy(tmp_path)
