"""The attacks are scripts of `examples/paper`, which import each other by name."""

import sys
from pathlib import Path

import pytest

from tests.attacks.dishonest import Aggregator

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "paper"))


@pytest.fixture(scope="module")
def aggregator(tmp_path_factory: pytest.TempPathFactory) -> Aggregator:
    return Aggregator(tmp_path_factory.mktemp("federation"))
