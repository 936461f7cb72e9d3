"""A trial that once cost a silo its budget, again, by the public commands and the real Flower runtime.

Plan 1 is accepted and stopped in training. One silo goes offline, and a second plan is signed meanwhile. What was
spent then on plan 1, and the messages that helped nobody out, must not be seen again.
"""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from aggregator.config import Federation
from ddm.protocol.base import now_utc
from silo.config import Site
from tests.support.federation import POLICY, write_policy
from tests.support.operators import SILOS, Operators, set_up_federation

MANY_STEPS = 200_000
PERSON = POLICY | {"approval": {"kind": "person"}}


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    operators.stop()


def silo_status(operators: Operators, silo: str) -> dict[str, object]:
    status: dict[str, object] = json.loads(
        operators.call("silo", "status", operators.folder / silo, "--json")
    )
    return status


def standing(operators: Operators, silo: str) -> str:
    """What `aggregator status` says of a silo."""
    status = json.loads(operators.call("aggregator", "status", operators.fed, "--json"))
    return str(next(entry["standing"] for entry in status["silos"] if entry["silo_id"] == silo))


def paid(operators: Operators, silo: str) -> list[str]:
    """The plans for which a silo's ledger holds a debit."""
    ledger = Site(operators.folder / silo).ledger_path
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return [record["plan_id"] for record in map(json.loads, lines) if record["record"] == "debit"]


def is_in(operators: Operators, silo: str, state: str, plan_id: str) -> bool:
    path = operators.folder / silo / "private" / "state.json"
    document = json.loads(path.read_bytes()) if path.exists() else {}
    return (document.get("state"), document.get("plan_id")) == (state, plan_id)


def end(operators: Operators, *services: str) -> None:
    """Stop services, as Ctrl-C or a shutdown does."""
    for service in services:
        operators.running.pop(service).terminate()


def waive_audits(operators: Operators) -> None:
    """Waive the audits, which cannot tell with so few images, for the plan in force: each plan needs its own waiver."""
    digest = Federation(operators.fed).current_plan()[1]
    terms = (
        "--role",
        "test operator",
        "--reason",
        "made-up images",
        "--until",
        now_utc().date() + timedelta(days=30),
    )
    for silo in SILOS:
        operators.call("silo", "waive", operators.folder / silo, *terms, "--plan-digest", digest)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_superseded_plan_costs_nothing_and_every_way_out_works_when_typed(
    operators: Operators,
) -> None:
    folder = operators.folder
    set_up_federation(operators, num_steps=MANY_STEPS)
    first = operators.plan_id
    for silo in SILOS:
        write_policy(Site(folder / silo), PERSON)
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    for silo in SILOS:
        operators.serve(silo, "silo", "run", folder / silo)
    training = lambda: all(is_in(operators, silo, "training", first) for silo in SILOS)  # noqa: E731
    operators.wait_until(training, "both silos in training")
    busy = operators.call("aggregator", "plan", operators.fed, "--recipe", folder / "plan.toml",
                          "--public", folder / "public.npz", "--yes", code=6)  # fmt: skip
    assert "aggregator run" in busy
    end(operators, "aggregator", "north")  # north is offline; south goes on training

    recipe = folder / "plan.toml"
    recipe.write_text(recipe.read_text().replace(f"num_steps = {MANY_STEPS}", "num_steps = 6"))
    operators.call("aggregator", "plan", operators.fed, "--recipe", recipe,
                   "--public", folder / "public.npz", "--yes")  # fmt: skip
    second = operators.plan_id
    waive_audits(operators)
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    waits = lambda silo: lambda: is_in(operators, silo, "awaiting_approval", second)  # noqa: E731
    operators.wait_until(waits("south"), "south at the second plan, without help")
    assert silo_status(operators, "north")["state"] == "training"  # it cannot know yet
    assert paid(operators, "south") == [second]
    operators.serve("north", "silo", "run", folder / "north")
    operators.wait_until(waits("north"), "north at the second plan, without help")
    assert paid(operators, "north") == [second]
    approval = lambda: all(standing(operators, silo) == "approval" for silo in SILOS)  # noqa: E731
    operators.wait_until(approval, "what both silos say at the aggregator as well")

    # South leaves with the command that its status names; north approves with the one that its own names.
    end(operators, "south")
    said = operators.call("silo", "status", folder / "south")
    assert "silo approve" in said
    assert "Nothing was sent" in operators.call("silo", "withdraw", folder / "south", "--yes")
    assert "gave the plan up" in operators.call("silo", "status", folder / "south")
    operators.serve("south", "silo", "run", folder / "south")
    digest = silo_status(operators, "north")["submission_digest"]
    operators.call("silo", "approve", folder / "north", "--digest", digest)
    operators.wait_until(
        lambda: all(map(operators.ended_well, ("aggregator", "north"))),
        "north's receipt, south's leave",
    )
    assert (silo_status(operators, "north")["state"], standing(operators, "north")) == (
        "accepted",
        "accepted",
    )
    confirmed = lambda: silo_status(operators, "south")["confirmed"] is True  # noqa: E731
    operators.wait_until(confirmed, "the aggregator's word that south is left out")
    assert standing(operators, "south") == "withdrawn"
    assert paid(operators, "south") == [second]
