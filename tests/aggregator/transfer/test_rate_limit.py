"""A cap on the rate of shards, by a clock that the test sets."""

import pytest

from aggregator.transfer.dispatcher import RateLimit
from tests.support.clocks import ManualClock

MIB = 2**20


def bytes_requested(limit: RateLimit, clock: ManualClock, seconds: int, message_bytes: int) -> int:
    """Return the bytes requested by a caller that tries four times a second."""
    total = 0
    for _ in range(seconds * 4):
        while limit.allows_request():
            limit.count(message_bytes)
            total += message_bytes
        clock.now += 0.25
    return total


@pytest.mark.parametrize("rate", [64 * 1024, MIB, 25 * MIB])
def test_rate_holds_on_average_when_pieces_are_large(rate: int) -> None:
    clock = ManualClock()
    limit = RateLimit(rate, clock)
    piece = limit.message_bytes(64 * MIB)
    total = bytes_requested(limit, clock, 600, piece)
    assert 0.9 * 600 * rate <= total <= 600 * rate + piece


def test_rest_is_not_saved_up_when_nothing_was_asked_for() -> None:
    clock = ManualClock()
    limit = RateLimit(MIB, clock)
    clock.now += 3600
    assert bytes_requested(limit, clock, 60, MIB) <= 61 * MIB


def test_cap_is_shared_when_two_silos_ask() -> None:
    clock = ManualClock()
    shared = RateLimit(MIB, clock)
    shared.count(10 * MIB)
    assert not shared.allows_request()
    clock.now += 10
    assert shared.allows_request()


def test_pieces_last_ten_seconds_at_most_and_are_never_tiny() -> None:
    assert RateLimit(MIB).message_bytes(64 * MIB) == 10 * MIB
    assert RateLimit(100 * MIB).message_bytes(64 * MIB) == 64 * MIB
    assert RateLimit(1).message_bytes(64 * MIB) == 64 * 1024
    assert RateLimit(None).message_bytes(64 * MIB) == 64 * MIB


def test_everything_goes_at_once_without_a_cap() -> None:
    limit = RateLimit(None)
    for _ in range(100):
        assert limit.allows_request()
        limit.count(MIB)
