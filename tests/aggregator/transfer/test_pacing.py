"""A cap on the rate of shards, by a clock that the test sets."""

import pytest

from aggregator.transfer.pacing import Pace

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pulled(pace: Pace, clock: Clock, seconds: int, piece: int) -> int:
    """Bytes asked for by whoever asks as often as it may, four times a second."""
    total = 0
    for _ in range(seconds * 4):
        while pace.open():
            pace.take(piece)
            total += piece
        clock.now += 0.25
    return total


@pytest.mark.parametrize("rate", [64 * 1024, MIB, 25 * MIB])
def test_rate_holds_on_average_when_pieces_are_large(rate: int) -> None:
    clock = Clock()
    pace = Pace(rate, clock)
    piece = pace.piece_bytes(64 * MIB)
    total = pulled(pace, clock, 600, piece)
    assert 0.9 * 600 * rate <= total <= 600 * rate + piece


def test_rest_is_not_saved_up_when_nothing_was_asked_for() -> None:
    clock = Clock()
    pace = Pace(MIB, clock)
    clock.now += 3600
    assert pulled(pace, clock, 60, MIB) <= 61 * MIB


def test_cap_is_shared_when_two_silos_ask() -> None:
    clock = Clock()
    together = Pace(MIB, clock)
    together.take(10 * MIB)
    assert not together.open()
    clock.now += 10
    assert together.open()


def test_pieces_last_ten_seconds_at_most_and_are_never_tiny() -> None:
    assert Pace(MIB).piece_bytes(64 * MIB) == 10 * MIB
    assert Pace(100 * MIB).piece_bytes(64 * MIB) == 64 * MIB
    assert Pace(1).piece_bytes(64 * MIB) == 64 * 1024
    assert Pace(None).piece_bytes(64 * MIB) == 64 * MIB


def test_everything_goes_at_once_without_a_cap() -> None:
    pace = Pace(None)
    for _ in range(100):
        assert pace.open()
        pace.take(MIB)
