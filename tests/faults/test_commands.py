"""Kill -9 and a full disk at calls of short commands that change the disk: the same command, given again, ends well.

Each trial works on a copy of a federation prepared to the stage where the command is given. Afterwards there are the
files of an undisturbed run and no others, private keys open and fit their public halves, and what follows works.
"""

import random
from collections.abc import Iterator

import pytest

from tests.support.faulty_disk import NEEDS_COMPILER, CommandServer
from tests.support.stages import CASES, ROTATED
from tests.support.trials import TrialBench

pytestmark = NEEDS_COMPILER
QUICK = ("aggregator enroll",)
KILLED = (
    "silo approve",
    "aggregator publish",
    "aggregator router",
    "ddm distill",
    *(f"aggregator rotate {key}" for key in ROTATED),
    "aggregator plan",
    "silo rotate",
    "silo withdraw",
    "aggregator admit",
    "aggregator remove",
    "ddm verify",
    "silo pause",
)
FEW = 40  # a command with at most so many calls is tried at each of them, another at NUM_TRIED
NUM_TRIED = 12


@pytest.fixture(scope="module")
def enrolling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialBench]:
    """A federation that silos are enrolled in."""
    with CommandServer(tmp_path_factory.mktemp("commands")) as commands:
        yield TrialBench(tmp_path_factory.mktemp("bench"), commands, until="founded")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialBench]:
    """A federation at every stage."""
    with CommandServer(tmp_path_factory.mktemp("commands")) as commands:
        yield TrialBench(tmp_path_factory.mktemp("bench"), commands)


def later_call(seed: int, num_calls: int) -> int:
    """Return a call; later ones, by which changes come into force, are likelier."""
    return 1 + int(num_calls * random.Random(seed).random() ** 0.5)


def spread(name: str, num_calls: int) -> list[int]:
    """Return the calls at which a command is tried."""
    every = range(1, num_calls + 1)
    return list(every) if num_calls <= FEW else sorted(random.Random(name).sample(every, NUM_TRIED))


@pytest.mark.parametrize("name", QUICK)
def test_enrolment_given_again_ends_as_undisturbed_when_it_was_killed_at_any_call(
    name: str, enrolling: TrialBench
) -> None:
    for at_call in range(1, enrolling.undisturbed(CASES[name]).num_kills + 1):
        enrolling.kill(CASES[name], at_call)


@pytest.mark.parametrize("name", QUICK)
def test_enrolment_says_what_is_full_and_ends_as_undisturbed_with_room(
    name: str, enrolling: TrialBench
) -> None:
    for at_call in range(1, enrolling.undisturbed(CASES[name]).num_full + 1):
        assert enrolling.fill(CASES[name], at_call)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(len(KILLED)))
def test_command_given_again_ends_as_undisturbed_when_it_was_killed(
    seed: int, bench: TrialBench
) -> None:
    case = CASES[KILLED[seed]]
    bench.kill(case, later_call(seed, bench.undisturbed(case).num_kills))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_command_says_what_is_full_and_ends_as_undisturbed_with_room(
    name: str, bench: TrialBench
) -> None:
    case = CASES[name]
    for at_call in spread(name, bench.undisturbed(case).num_full):
        bench.fill(case, at_call)


def test_seeds_kill_twenty_times_and_every_key_that_can_be_rotated() -> None:
    assert len(KILLED) == 20
    assert {name.split()[-1] for name in KILLED if "aggregator rotate" in name} == set(ROTATED)
