"""What an operator admitted although screening had flagged it is published with its name and the reason."""

from pathlib import Path

import pytest

from aggregator.intake.flags import Fault, remember_flags
from aggregator.intake.inventory import take_inventory
from aggregator.intake.quarantine import QuarantineDecision, record_decision
from ddm.protocol.base import now_utc
from tests.conftest import PublishedRelease
from tests.support.publishing import publish_next_version, verify_release

pytestmark = pytest.mark.usefixtures("short_pages")


def test_admitted_expert_is_named_in_the_next_version_with_the_rules_that_it_broke(
    published: PublishedRelease, tmp_path: Path
) -> None:
    federation = published.tiny.federation
    plan_id = published.plan_id
    digest = take_inventory(federation).silos["east"].digest
    remember_flags(
        federation, plan_id, digest, [Fault(expert_id="east", flag="stands_apart", words=": apart")]
    )
    assert not publish_next_version(published.tiny, tmp_path / "same").fresh, (
        "a flag alone changes nothing: nobody decided on it"
    )
    decision = {
        "plan_id": plan_id,
        "silo_id": "east",
        "submission_digest": digest,
        "reason": "a rare disease",
    }
    record_decision(federation, QuarantineDecision(verdict="admitted", at=now_utc(), **decision))
    assert publish_next_version(published.tiny, tmp_path / "next").fresh
    manifest = verify_release(published, tmp_path / "next").manifest
    assert {silo.silo_id: silo.admitted for silo in manifest.silos} == {
        "east": True,
        "north": False,
    }
    assert {expert.expert_id: expert.flags for expert in manifest.experts} == {
        "east": ("stands_apart",),
        "north": (),
    }
