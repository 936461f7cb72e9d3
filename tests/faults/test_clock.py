"""A silo whose clock is two days off: nothing is lost, the operator is told, and the right time mends it."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_kill import check_nothing_lost_or_doubled, check_published_once
from tests.support.operators import (
    Operators,
    all_services_ended,
    serve_everything,
    set_up_federation,
)

DAY_S = 86400

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not shutil.which("gcc"), reason="needs a C compiler to give one silo another clock"
    ),
]


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    operators.stop()


@pytest.fixture(scope="module")
def wrong_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that puts a program's clock off."""
    built = tmp_path_factory.mktemp("clock") / "wrong_clock.so"
    source = Path(__file__).with_name("wrong_clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    now = [sys.executable, "-c", "import time; print(time.time())"]
    shifted = subprocess.check_output(
        ["env", f"LD_PRELOAD={built}", f"CLOCK_OFFSET_S={2 * DAY_S}", *now]
    )
    assert float(shifted) > time.time() + DAY_S
    return built


@pytest.mark.parametrize("days", [2, -2])
def test_silo_with_a_wrong_clock_is_told_so_and_ends_well_with_the_right_one(
    days: int, operators: Operators, wrong_clock: Path
) -> None:
    set_up_federation(operators)
    for part in ("worker", "courier"):
        operators.prefix[f"north-{part}"] = [
            "env",
            f"LD_PRELOAD={wrong_clock}",
            f"CLOCK_OFFSET_S={days * DAY_S}",
        ]
    serve_everything(operators)
    south = operators.folder / "south" / "private" / "state.json"
    is_accepted = lambda: south.exists() and json.loads(south.read_text())["state"] == "accepted"  # noqa: E731
    operators.wait_until(is_accepted, "the other silo's receipt")
    names_the_clock = lambda: "clock" in operators.running["north-courier"].log_tail()  # noqa: E731
    operators.wait_until(names_the_clock, "a word about the clock")
    for part in ("worker", "courier"):
        operators.running[f"north-{part}"].terminate()
        del operators.prefix[f"north-{part}"]
        operators.serve(f"north-{part}", "silo", "run", operators.folder / "north", "--only", part)
    operators.wait_until(lambda: all_services_ended(operators), "the end")
    check_published_once(operators, check_nothing_lost_or_doubled(operators))
