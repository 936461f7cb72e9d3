"""Waits that grow with every try."""

from ddm.system.backoff import Backoff
from tests.support.clocks import ManualClock


def test_faults_of_two_weeks_do_not_add_up_to_an_end() -> None:
    clock = ManualClock()
    backoff = Backoff(3, clock=clock)
    for _ in range(14 * 24):
        assert backoff.allowed() and backoff.delay_s() == 0.0
        backoff.count()
        clock.now += 3601.0
    for num in range(3):
        assert backoff.allowed() and backoff.delay_s() == (0.0, 1.0, 5.0)[num]
        backoff.count()
    assert not backoff.allowed()
    clock.now += 3601.0
    assert backoff.allowed() and backoff.num == 14 * 24 + 3


def test_waits_are_never_longer_than_their_bound_and_short_again_after_a_success() -> None:
    backoff = Backoff(longest_s=10.0, clock=ManualClock())
    waits = []
    for _ in range(100):
        assert backoff.allowed()
        waits.append(backoff.delay_s())
        backoff.count()
    assert waits[:5] == [0.0, 1.0, 5.0, 10.0, 10.0] and max(waits) == 10.0
    backoff.reset()
    assert backoff.delay_s() == 0.0 and backoff.num == 100
