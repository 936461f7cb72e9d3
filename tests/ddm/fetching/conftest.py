"""A small signed release, without documents that parse, and hosts that serve it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddm.fetching.hosts import FetchLimits
from tests.ddm.trust.conftest import (  # noqa: F401, fixtures
    SignedFederation,
    federation,
    make_federation,
)
from tests.support.hosts import HostHandler, HostState, serve

# Slow hosts are given up after a fifth of a second, and tried twice without a pause.
QUICK = FetchLimits(window_s=0.2, window_bytes=1 << 10, max_attempts=2, pause_s=0.0)


@pytest.fixture
def limits() -> FetchLimits:
    return QUICK


@pytest.fixture
def state(tmp_path: Path) -> HostState:
    return HostState(tmp_path / "www")


@pytest.fixture
def url(state: HostState) -> Iterator[str]:
    with serve(HostHandler, state) as address:
        yield address
