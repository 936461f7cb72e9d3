"""A plan that brings networks waits for a person, and outside one number says that somebody is needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddm.errors import ApprovalError
from ddm.protocol.encoder import TimmEncoderSpec
from ddm.protocol.plan import Plan
from silo.config import PlansPolicy, Policy
from silo.plan.consent import is_accepted, may_begin, networks_of, read_waiting, record_acceptance
from silo.worker.state import reported_code
from silo.worker.worker import Worker
from tests.support.commands import run_command
from tests.support.documents import plan_document, to_bytes
from tests.support.federation import POLICY, TinyFederation, write_policy

SILO = "north"
DIGEST = "a" * 64
OTHER = "b" * 64


def plan(**changes: Any) -> Plan:
    return Plan.parse(to_bytes(plan_document(**changes)), subject="plan.json")


@pytest.mark.parametrize(
    ("accepts", "brings", "begins"),
    [
        ("policy", True, True),
        ("policy", False, True),
        ("networks", True, False),
        ("networks", False, True),
        ("person", True, False),
        ("person", False, False),
    ],
)
def test_plan_begins_without_a_person_only_where_the_policy_says_so(
    accepts: Any,
    brings: bool,
    begins: bool,
    planned_once,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = planned_once.tiny.copy(tmp_path / "copy").sites[SILO]
    monkeypatch.setattr(
        "silo.plan.consent.networks_of", lambda plan: iter(["an autoencoder"] * brings)
    )
    policy = Policy(plans=PlansPolicy(accept=accepts))
    assert may_begin(site, policy, plan(), DIGEST) == begins
    assert (read_waiting(site) is None) == begins
    if not begins:
        with pytest.raises(ApprovalError, match=DIGEST):
            record_acceptance(site, OTHER)
        record_acceptance(site, DIGEST)
        assert may_begin(site, policy, plan(), DIGEST)
        assert not may_begin(site, policy, plan(), OTHER)


def test_networks_of_a_plan_are_those_that_see_private_images() -> None:
    assert list(networks_of(plan())) == []
    encoder = TimmEncoderSpec(
        dim=64, model="test_vit", image_size=(160, 160), mean=(0.5,), std=(0.5,)
    )
    assert list(networks_of(plan().model_copy(update={"encoder": encoder}))) == [
        "the encoder test_vit"
    ]


def test_worker_waits_for_a_person_in_the_state_that_it_was_in(
    planned_once, tmp_path: Path
) -> None:
    tiny: TinyFederation = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"plans": {"accept": "person"}})
    worker = Worker(site, tiny.key(SILO), lambda state: None)
    worker.begin()
    for _ in range(3):
        worker.step()
    assert worker.state.state == "waiting"
    # The aggregator learns that a person is needed here, and nothing else: not which plan, nor why.
    sent = json.loads((site.outbox / "status.json").read_bytes())
    assert sent == {
        "plan_id": None,
        "state": "waiting",
        "progress": 0,
        "sequence": 1,
        "code": ApprovalError.exit_code,
    }
    waiting = read_waiting(site)
    assert waiting
    shown = run_command("silo", "status", site.path).out
    assert f"silo accept {site.path} --digest {waiting.plan_digest}" in " ".join(shown.split())
    assert run_command("silo", "accept", site.path, "--digest", OTHER).code == 34
    assert run_command("silo", "accept", site.path, "--digest", "junk").code == 3
    result = run_command("silo", "accept", site.path, "--digest", waiting.plan_digest)
    assert result.code == 0, result.err
    assert is_accepted(site, waiting.plan_digest)
    worker.step()
    assert (str(worker.state.state), read_waiting(site)) == ("plan_accepted", None)
    assert reported_code(site) == 0
