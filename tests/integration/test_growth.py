"""A federation that grows, through the public commands and the real Flower runtime: two silos, then a late third."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aggregator.config import Federation
from ddm.protocol.base import sha256_file
from silo.config import Site
from tests.support.federation import POLICY, images, waive, write_policy
from tests.support.operators import SILOS, Operators, set_up_federation

LATE = "west"
LATE_IMAGES = 30


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    operators.stop()


def run_plan(operators: Operators, silos: tuple[str, ...]) -> None:
    """Run the aggregator and these silos until every one of them has its receipt."""
    operators.running.clear()
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    for silo in silos:
        operators.serve(silo, "silo", "run", operators.folder / silo)
    operators.wait_until(
        lambda: all(map(operators.ended_well, ("aggregator", *silos))), "a receipt of every silo"
    )


def publish(operators: Operators, out: Path) -> str:
    operators.call("aggregator", "router", operators.fed)
    return operators.call("aggregator", "publish", operators.fed, "--rehearsal", "--out", out)


@pytest.mark.slow
def test_late_silo_joins_the_experts_that_a_second_plan_carries_over(operators: Operators) -> None:
    folder = operators.folder
    set_up_federation(operators)
    first = operators.plan_id
    run_plan(operators, tuple(SILOS))
    publish(operators, folder / "first")
    sent = {silo: (folder / silo / "private" / "ledger.jsonl").read_bytes() for silo in SILOS}

    np.savez(folder / f"{LATE}.npz", images=images(LATE_IMAGES, 0.3, seed=7))
    seen = operators.call(
        "ddm", "verify", folder / "first", "--root", root(operators), *state(operators)
    )
    assert "none unlisted" in seen
    join(operators)
    recipe = ("--recipe", folder / "plan.toml")
    both = operators.call("aggregator", "plan", operators.fed, *recipe, "--carry", first,
                          "--public", folder / "public.npz", "--yes", code=3)  # fmt: skip
    assert "--public, --carry" in both
    said = operators.call("aggregator", "plan", operators.fed, *recipe, "--carry", first, "--yes")
    assert f"carried from {first}" in said
    assert operators.plan_id != first
    waive(Site(folder / LATE), Federation(operators.fed).current_plan()[1])
    run_plan(operators, (LATE,))
    publish(operators, folder / "second")

    assert "none unlisted" in operators.call("ddm", "verify", folder / "second", "--root", root(operators),
                                             *state(operators))  # fmt: skip
    info = operators.call(
        "ddm", "info", folder / "second", "--root", root(operators), *state(operators)
    )
    assert f"silo {LATE} joined with this plan" in info
    for silo in SILOS:
        assert f"silo {silo} was carried over from plan {first}" in info
        assert (folder / silo / "private" / "ledger.jsonl").read_bytes() == sent[silo]
        name = f"targets/{first}/silos/{silo}/experts/{silo}/expert.safetensors"
        assert (folder / "second" / name).read_bytes() == (folder / "first" / name).read_bytes()
    operators.call("ddm", "sample", folder / "second", "--root", root(operators), *state(operators), "--num", "9",
                   "--steps", "4", "--strategy", "sample", "--out", folder / "samples.npz")  # fmt: skip
    with np.load(folder / "samples.npz") as drawn:
        assert drawn["images"].shape == (9, 1, 4, 4)
        assert np.isfinite(drawn["images"]).all()


def root(operators: Operators) -> Path:
    return operators.fed / "tuf" / "metadata" / "1.root.json"


def state(operators: Operators) -> tuple[object, object]:
    return "--state", operators.folder / "state"


def join(operators: Operators) -> None:
    """Make the site of the late silo, and enroll it."""
    folder = operators.folder
    invitation = operators.fed / "invitation.json"
    invitation_digest = sha256_file(invitation)
    operators.call("silo", "init", folder / LATE, "--id", LATE, "--data", folder / f"{LATE}.npz", "--invitation",
                   invitation, "--code", invitation_digest, "--passphrase-file", folder / "pass")  # fmt: skip
    write_policy(Site(folder / LATE), POLICY)
    operators.call("silo", "enroll", folder / LATE, "--out", folder / f"{LATE}.card.json")
    operators.call("aggregator", "enroll", "--yes", operators.fed, folder / f"{LATE}.card.json")
