"""What the ServerApp fetches of one silo, and what it leaves alone."""

from pathlib import Path

import pytest

from aggregator.delivery import MAX_SUBMISSIONS, SiloDelivery
from ddm.exchange import Ask, Envelope, FileEntry, Report, Span, Status

PLAN = "digits-3f9a1c2e"
ENTRY = FileEntry(path="sketch.safetensors", num_bytes=3)
ASK = Ask(plan_id=PLAN, known=Status(), received=0, max_bytes=1000, wait_s=0)


@pytest.fixture
def delivery(tmp_path: Path) -> SiloDelivery:
    return SiloDelivery(tmp_path, PLAN, "north", index=(), shard_bytes=1000, max_submission_bytes=1000, wait_s=0)


def announce(delivery: SiloDelivery, sequence: int) -> None:
    span = Span(path=ENTRY.path, offset=0, num_bytes=3)
    report = Report(status=Status(), sequence=sequence, files=(ENTRY,), spans=(span,))
    assert delivery.take(ASK, Envelope(report, b"abc")) == 0


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "incoming" / PLAN / "north").iterdir()} - {"status.json"}


@pytest.mark.parametrize("sequence", [MAX_SUBMISSIONS + 1, 999_999])
def test_submission_is_not_fetched_when_a_silo_sends_one_after_the_other(
    delivery: SiloDelivery, tmp_path: Path, sequence: int
) -> None:
    announce(delivery, MAX_SUBMISSIONS)
    assert names(tmp_path) == {str(MAX_SUBMISSIONS)}
    announce(delivery, sequence)
    assert names(tmp_path) == {str(MAX_SUBMISSIONS), f"{sequence}.toomany"}


def test_submission_is_not_fetched_again_when_it_was_answered_and_thrown_away(
    delivery: SiloDelivery, tmp_path: Path
) -> None:
    receipts = tmp_path / "receipts" / PLAN / "north"
    receipts.mkdir(parents=True)
    (receipts / "1.json").write_bytes(b"refused")
    announce(delivery, 1)
    assert names(tmp_path) == set()
    announce(delivery, 2)
    assert names(tmp_path) == {"2"}
