"""A site's own cap on what leaves: smaller answers, held back for as long as they may take."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddm.transport.messages import (
    Envelope,
    Offer,
    Pull,
    Shards,
    Span,
    Status,
    StatusQuery,
    StatusReport,
)
from silo.courier.handlers import SiteLimits, answer

PLAN = "digits-3f9a1c2e"
RATE = 100


@pytest.fixture
def limits(tmp_path: Path) -> SiteLimits:
    folder = tmp_path / "outbox" / PLAN / "1"
    folder.mkdir(parents=True)
    (tmp_path / "inbox").mkdir()
    (folder / "a").write_bytes(bytes(900))
    (folder / "b").write_bytes(bytes(900))
    return SiteLimits(
        tmp_path, bundle_bytes=1, shard_bytes=5000, submission_bytes=5000, bytes_per_s=RATE
    )


PULL = Pull(
    plan_id=PLAN, sequence=1, spans=tuple(Span(path=name, offset=0, num_bytes=900) for name in "ab")
)


def paced(request: StatusQuery | Pull | Offer, limits: SiteLimits) -> tuple[Envelope, float]:
    waited: list[float] = []
    return answer(Envelope(request), limits, pause=waited.append), sum(waited)


def test_answer_is_cut_to_ten_seconds_and_held_back_for_them(limits: SiteLimits) -> None:
    reply, waited = paced(PULL, limits)
    spans = (Span(path="a", offset=0, num_bytes=900), Span(path="b", offset=0, num_bytes=100))
    assert reply == Envelope(Shards(spans=spans), bytes(1000)) and waited == 10.0


def test_news_of_a_submission_is_held_back_as_well(limits: SiteLimits) -> None:
    reply, waited = paced(
        StatusQuery(plan_id=PLAN, known=Status(), received=0, max_bytes=1200, wait_s=0), limits
    )
    assert isinstance(reply.message, StatusReport) and len(reply.data) == 1000 and waited == 10.0


def test_answer_without_bytes_is_not_held_back(limits: SiteLimits) -> None:
    assert (
        paced(StatusQuery(plan_id=PLAN, known=Status(), received=1, max_bytes=9, wait_s=0), limits)[
            1
        ]
        == 0
    )
    assert paced(replace_sequence(PULL), limits)[1] == 0


def test_answer_is_whole_and_at_once_without_a_cap(limits: SiteLimits) -> None:
    reply, waited = paced(PULL, replace(limits, bytes_per_s=0))
    assert len(reply.data) == 1800 and waited == 0


def replace_sequence(pull: Pull) -> Pull:
    return pull.model_copy(update={"sequence": 2})
