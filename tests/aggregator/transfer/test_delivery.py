"""What the ServerApp fetches of one silo, and what it leaves alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aggregator.transfer.delivery import SiloDelivery, TransferLimits
from aggregator.transfer.receipts_folder import count_unsigned, read_unsigned_count
from ddm.errors import FormatError
from ddm.transport.messages import (
    MAX_SUBMISSIONS,
    BundleProgress,
    Envelope,
    IndexEntry,
    Offer,
    Span,
    Status,
    StatusQuery,
    StatusReport,
)
from tests.support.waiting import LIMIT_S

PLAN = "digits-3f9a1c2e"
ENTRY = IndexEntry(path="sketch.safetensors", num_bytes=3)
ASK = StatusQuery(plan_id=PLAN, known=Status(), received=0, max_bytes=1000, wait_s=0)


@pytest.fixture
def delivery(tmp_path: Path) -> SiloDelivery:
    return SiloDelivery(
        tmp_path,
        PLAN,
        "north",
        index=(),
        limits=TransferLimits(shard_bytes=1000, max_submission_bytes=1000, wait_s=0),
    )


def announce(delivery: SiloDelivery, sequence: int) -> None:
    span = Span(path=ENTRY.path, offset=0, num_bytes=3)
    report = StatusReport(status=Status(), sequence=sequence, files=(ENTRY,), spans=(span,))
    assert delivery.take(ASK, Envelope(report, b"abc")) == 0


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "incoming" / PLAN / "north").iterdir()} - {
        "status.json",
        "seen",
    }


def received_in_query(delivery: SiloDelivery) -> int:
    """Return the submission up to which the silo need not announce any."""
    delivery._bundle_complete = True
    (envelope,) = delivery.next_requests([], 3)
    assert isinstance(envelope.message, StatusQuery)
    return envelope.message.received


@pytest.mark.parametrize("sequence", [2, MAX_SUBMISSIONS + 1, 999_999])
def test_submission_out_of_order_is_neither_fetched_nor_held_against_the_silo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sequence: int
) -> None:
    """The attack: somebody answers in the silo's place, and the aggregator signs that it wants no more of it."""
    now = [0.0]
    limits = TransferLimits(shard_bytes=1000, max_submission_bytes=1000, wait_s=0)
    delivery = SiloDelivery(tmp_path, PLAN, "north", index=(), limits=limits, clock=lambda: now[0])
    assert received_in_query(delivery) == 0
    announce(delivery, sequence)
    assert names(tmp_path) == set()
    assert "expected 1; not fetched" in caplog.text
    assert received_in_query(delivery) == sequence, "the silo need not announce it again at once"
    now[0] = 3600.0
    assert received_in_query(delivery) == 0
    announce(delivery, 1)
    assert names(tmp_path) == {"1"}


def test_submission_beyond_the_last_that_may_be_refused_is_not_fetched(
    delivery: SiloDelivery, tmp_path: Path
) -> None:
    receipts = tmp_path / "receipts" / PLAN / "north"
    receipts.mkdir(parents=True)
    (receipts / f"{MAX_SUBMISSIONS}.json").write_bytes(b"refused")
    announce(delivery, MAX_SUBMISSIONS + 1)
    assert names(tmp_path) == set()


def test_submission_that_was_not_as_signed_is_fetched_again_later_and_ever_more_slowly(
    delivery: SiloDelivery, tmp_path: Path
) -> None:
    receipts = tmp_path / "receipts" / PLAN / "north"
    for times, least_s in ((1, 59), (2, 119), (3, 239), (12, 3599)):
        for _ in range(times - read_unsigned_count(receipts / "1.unsigned")):
            count_unsigned(receipts, 1)
        announce(delivery, 1)
        assert names(tmp_path) == set()
        aged = time.time() - least_s
        os.utime(receipts / "1.unsigned", (aged, aged))
        announce(delivery, 1)
        assert names(tmp_path) == set()
    aged = time.time() - 3700
    os.utime(receipts / "1.unsigned", (aged, aged))
    announce(delivery, 1)
    assert names(tmp_path) == {"1"}


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


WRITER = """
import os
import signal
import sys
from pathlib import Path
from aggregator.transfer.delivery import SiloDelivery, TransferLimits
from ddm.transport.messages import Envelope
from silo.courier.handlers import SiteLimits, answer
root, plan, shard, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limits = SiteLimits(root / "site", bundle_bytes=10**6, shard_bytes=shard, submission_bytes=10**9)
transfer = TransferLimits(shard_bytes=shard, max_submission_bytes=10**9, wait_s=0)
delivery = SiloDelivery(root / "fed", plan, "north", index=(), limits=transfer)
delivery._bundle_complete = True
sync, synced = os.fsync, []
def killing(descriptor):
    sync(descriptor)
    synced.append(descriptor)
    if len(synced) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killing
with open(root / "fetched", "a") as log:
    while not (root / "fed" / "incoming" / plan / "north" / "1").exists():
        for envelope in delivery.next_requests([], 2):
            reply = answer(envelope, limits)
            print(len(reply.data), file=log, flush=True)
            delivery.take(envelope.message, reply)
"""


@pytest.mark.parametrize("kill_at", [3, 5, 6])
def test_submission_goes_on_where_it_stopped_when_the_writer_is_killed(
    tmp_path: Path, kill_at: int
) -> None:
    """Killed between any two writes of a shard: its bytes, the note that they are there, the folders."""
    shard = 50_000
    size = 1_000_000
    outbox = tmp_path / "site" / "outbox" / PLAN / "1"
    outbox.mkdir(parents=True)
    (tmp_path / "site" / "inbox" / PLAN).mkdir(parents=True)
    (outbox / "expert.safetensors").write_bytes(os.urandom(size))
    command = [sys.executable, "-c", WRITER, str(tmp_path), PLAN, str(shard)]
    runs = [subprocess.run([*command, str(kill_at)], check=False).returncode for _ in range(2)]
    assert runs == [-signal.SIGKILL] * 2
    subprocess.run([*command, "0"], check=True, timeout=LIMIT_S)
    arrived = tmp_path / "fed" / "incoming" / PLAN / "north" / "1" / "expert.safetensors"
    assert arrived.read_bytes() == (outbox / "expert.safetensors").read_bytes()
    fetched = sum(int(line) for line in (tmp_path / "fetched").read_text().split())
    assert size <= fetched <= size + 2 * shard, "each kill costs one shard at most"


def test_bundle_is_not_sent_a_thousand_times_when_a_silo_lacks_the_same_range_a_thousand_times(
    tmp_path: Path,
) -> None:
    index = (IndexEntry(path="plan.json", num_bytes=10),)
    limits = TransferLimits(shard_bytes=100, max_submission_bytes=100, wait_s=0)
    delivery = SiloDelivery(tmp_path, PLAN, "north", index=index, limits=limits)
    offer = Offer(plan_id=PLAN, files=index, spans=())
    whole = Span(path="plan.json", offset=0, num_bytes=10)
    with pytest.raises(FormatError):
        delivery.take(offer, Envelope(BundleProgress(missing=(whole,) * 1000)))
    half = Span(path="plan.json", offset=0, num_bytes=5)
    with pytest.raises(FormatError):
        delivery.take(offer, Envelope(BundleProgress(missing=(whole, half))))
    assert delivery.take(offer, Envelope(BundleProgress(missing=(half,)))) == 0


def test_silo_that_the_plan_does_not_name_hears_so_and_nothing_is_fetched_from_it(
    tmp_path: Path,
) -> None:
    limits = TransferLimits(shard_bytes=1000, max_submission_bytes=1000, wait_s=0)
    delivery = SiloDelivery(tmp_path, PLAN, "west", index=(), limits=limits, takes_part=False)
    assert delivery.is_finished
    (query,) = [envelope.message for envelope in delivery.next_requests([], 4)]
    assert isinstance(query, StatusQuery) and not query.named
    # The attack: it announces a submission to a plan that it has no part in.
    files = (IndexEntry(path="expert", num_bytes=1),)
    report = StatusReport(status=Status(state="in_outbox"), sequence=1, files=files)
    assert delivery.take(query, Envelope(report)) == 0
    assert not delivery.is_pulling
    assert not list((tmp_path / "incoming" / PLAN / "west").glob("1*"))
