"""The attacks measured by `examples/paper/privacy` meet the same noise in every run."""

import pytest

from ddm.privacy.noise import OS_NOISE
from tests.support.dishonest_aggregator import DishonestAggregator
from tests.support.seeded import SeededNoise


@pytest.fixture(scope="module")
def aggregator(tmp_path_factory: pytest.TempPathFactory) -> DishonestAggregator:
    return DishonestAggregator(tmp_path_factory.mktemp("federation"))


@pytest.fixture(autouse=True)
def seeded_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks meet the same noise in every run: a bound that fails once in some thousand draws fails always or never.

    Its law is what the operating system's randomness gives, which `tests/ddm/privacy/test_noise.py` looks at.
    """
    seeded = SeededNoise(0)
    monkeypatch.setattr(OS_NOISE, "below", seeded.below)
    monkeypatch.setattr(OS_NOISE, "octets", seeded.octets)
