"""The aggregator's and the courier's halves of the exchange against each other, without Flower between them."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest

from aggregator.transfer.delivery import SiloDelivery, TransferLimits, load_bundle
from aggregator.transfer.receipts_folder import is_plan_finished
from ddm.errors import DigestError, FormatError, PolicyError, ReplayError, UnsafePathError
from ddm.transport.messages import (
    BundleProgress,
    Envelope,
    IndexEntry,
    Offer,
    Pull,
    ReceiptDelivery,
    Shards,
    Span,
    Status,
    StatusQuery,
    StatusReport,
)
from silo.courier.handlers import SiteLimits, answer
from tests.support.bundles import Signer, site_settings

PLAN = "digits-3f9a1c2e"
SHARD = 1000


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path / "tuf")


@pytest.fixture
def fed(tmp_path, signer):
    bundle = tmp_path / "fed" / "plans" / PLAN / "bundle"
    signer.sign(bundle, PLAN, {"plan/centroids.safetensors": os.urandom(2500)})
    return tmp_path / "fed"


@pytest.fixture
def limits(tmp_path, signer):
    for name in ("inbox", "outbox"):
        (tmp_path / "site" / name).mkdir(parents=True)
    site_settings(tmp_path / "site")
    (tmp_path / "site" / "courier" / "1.root.json").write_bytes(signer.root)
    return SiteLimits(
        tmp_path / "site", bundle_bytes=50_000, shard_bytes=SHARD, submission_bytes=20_000
    )


def delivery(fed, **changes):
    settings = {"shard_bytes": SHARD, "max_submission_bytes": 20_000, "wait_s": 0, **changes}
    index = load_bundle(fed / "plans" / PLAN / "bundle")
    return SiloDelivery(fed, PLAN, "north", index=index, limits=TransferLimits(**settings))


def submit(limits, sequence=1, size=4321):
    part = limits.site / "outbox" / PLAN / ".part"
    (part / "silos" / "north").mkdir(parents=True)
    (part / "silos" / "north" / "submission.json").write_bytes(os.urandom(200))
    (part / "sketch.safetensors").write_bytes(os.urandom(size))
    part.rename(part.with_name(str(sequence)))
    status = {"plan_id": PLAN, "state": "in_outbox", "progress": 100, "sequence": sequence}
    (limits.site / "outbox" / "status.json").write_text(json.dumps(status))


def intake(fed, signer, sequence=1, final=True):
    receipts = fed / "receipts" / PLAN / "north"
    receipts.mkdir(parents=True, exist_ok=True)
    sealed = signer.receipt(fed / "plans" / PLAN / "bundle", PLAN, sequence=sequence)
    (receipts / f"{sequence}.json").write_bytes(sealed)
    if final:
        (receipts / "final").touch()


def converse(fed, limits, *, until, lose=lambda: False, restart=lambda: False, rounds=300):
    """Exchange messages, out of order, until a condition holds; some are lost, and the ServerApp starts afresh."""
    shuffle = random.Random(7)
    aggregator = delivery(fed)
    in_flight = []
    for _ in range(rounds):
        if until():
            return aggregator
        if restart():
            aggregator = delivery(fed)
            in_flight = []
        in_flight += aggregator.next_requests([e.message for e in in_flight], 4)
        shuffle.shuffle(in_flight)
        if in_flight:
            envelope = in_flight.pop()
            if not lose():
                reply = answer(envelope, limits)
                if not lose():
                    assert aggregator.take(envelope.message, reply) == 0
    raise AssertionError("the conversation does not end")


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_everything_arrives_identical_when_messages_are_lost_and_the_server_restarts(
    fed, limits, signer, seed
):
    chance = random.Random(seed)
    faults = {}
    if seed is not None:
        faults = {"lose": lambda: chance.random() < 0.3, "restart": lambda: chance.random() < 0.1}
    bundle = limits.site / "inbox" / PLAN / "bundle"
    converse(fed, limits, until=bundle.exists, **faults)
    assert contents(bundle) == contents(fed / "plans" / PLAN / "bundle")

    submit(limits)
    incoming = fed / "incoming" / PLAN / "north"
    converse(fed, limits, until=(incoming / "1").exists, **faults)
    assert contents(incoming / "1") == contents(limits.site / "outbox" / PLAN / "1")
    assert json.loads((incoming / "status.json").read_text())["state"] == "in_outbox"

    intake(fed, signer)
    assert not is_plan_finished(fed, PLAN, ["north"])
    aggregator = converse(
        fed, limits, until=lambda: is_plan_finished(fed, PLAN, ["north"]), **faults
    )
    receipt = limits.site / "inbox" / PLAN / "receipts" / "1.json"
    assert receipt.read_bytes() == (fed / "receipts" / PLAN / "north" / "1.json").read_bytes()
    assert aggregator.is_finished
    # it may still give the plan up
    assert [request.message.kind for request in aggregator.next_requests([], 4)] == ["status_query"]


def test_second_submission_is_fetched_when_the_first_was_refused(fed, limits, signer):
    submit(limits)
    incoming = fed / "incoming" / PLAN / "north"
    bundle = limits.site / "inbox" / PLAN / "bundle"
    converse(fed, limits, until=lambda: bundle.exists() and (incoming / "1").exists())
    assert delivery_is_quiet(fed, limits), "nothing is asked while the receipt is being made"
    intake(fed, signer, final=False)
    converse(fed, limits, until=(fed / "receipts" / PLAN / "north" / "1.delivered").exists)
    submit(limits, sequence=2)
    converse(fed, limits, until=(incoming / "2").exists)
    assert contents(incoming / "2") == contents(limits.site / "outbox" / PLAN / "2")


def delivery_is_quiet(fed, limits):
    aggregator = delivery(fed)
    (offer, *_) = aggregator.next_requests([], 4)
    aggregator.take(offer.message, answer(offer, limits))
    return aggregator.next_requests([], 4) == []


def test_bundle_is_never_replaced_when_the_aggregator_offers_other_content(fed, limits):
    bundle = limits.site / "inbox" / PLAN / "bundle"
    converse(fed, limits, until=bundle.exists)
    before = contents(bundle)
    plan = fed / "plans" / PLAN / "bundle" / "targets" / PLAN / "plan.json"
    plan.write_bytes(b"evil")
    aggregator = delivery(fed, shard_bytes=10**6)
    codes = []
    for _ in range(3):
        (offer, *_) = aggregator.next_requests([], 4)
        codes.append(aggregator.take(offer.message, answer(offer, limits)))
    assert DigestError.exit_code in codes
    assert contents(bundle) == before


def test_bundle_is_refused_when_it_is_larger_than_the_site_allows(fed, limits):
    (offer, *_) = delivery(fed).next_requests([], 4)
    small = replace(limits, bundle_bytes=2499)
    assert answer(offer, small).message == BundleProgress(code=PolicyError.exit_code)
    assert not list((limits.site / "inbox").iterdir())


def test_nothing_outside_the_outbox_is_given_when_the_outbox_holds_a_link(limits, tmp_path):
    submit(limits)
    (tmp_path / "site" / "private").mkdir()
    (tmp_path / "site" / "private" / "key").write_bytes(b"secret")
    outbox = limits.site / "outbox" / PLAN
    (outbox / "1" / "door").symlink_to(tmp_path / "site" / "private")
    pull = Pull(plan_id=PLAN, sequence=1, spans=(Span(path="door/key", offset=0, num_bytes=6),))
    assert answer(Envelope(pull), limits) == Envelope(Shards(code=UnsafePathError.exit_code))
    ask = StatusQuery(plan_id=PLAN, known=Status(), received=0, max_bytes=1000, wait_s=0)
    assert answer(Envelope(ask), limits) == Envelope(StatusReport(code=UnsafePathError.exit_code))


def test_shards_are_refused_when_more_is_asked_for_than_the_site_gives_at_once(limits):
    submit(limits)
    span = Span(path="sketch.safetensors", offset=0, num_bytes=SHARD + 1)
    reply = answer(Envelope(Pull(plan_id=PLAN, sequence=1, spans=(span,))), limits)
    assert reply == Envelope(Shards(code=PolicyError.exit_code))


def test_receipt_is_refused_when_it_is_for_no_submission_or_replaces_one(fed, limits, signer):
    submit(limits)
    refused = ReplayError.exit_code
    bundle = fed / "plans" / PLAN / "bundle"
    one, two, three = (signer.receipt(bundle, PLAN, sequence=sequence) for sequence in (1, 2, 3))
    # no such plan
    assert (
        answer(Envelope(ReceiptDelivery(plan_id=PLAN, sequence=1), one), limits).message.code
        == refused
    )
    shutil.copytree(bundle, limits.site / "inbox" / PLAN / "bundle")
    other = signer.receipt(bundle, PLAN, submission_digest="1" * 64)
    # One after the last submission is a notice that the silo was withdrawn.
    for sequence, receipt, code in (
        (3, three, refused),
        (1, one, 0),
        (1, other, refused),
        (2, two, 0),
    ):
        assert (
            answer(
                Envelope(ReceiptDelivery(plan_id=PLAN, sequence=sequence), receipt), limits
            ).message.code
            == code
        )
    assert (limits.site / "inbox" / PLAN / "receipts" / "1.json").read_bytes() == one


@pytest.mark.parametrize(
    "status", ["{", '{"plan_id": "x"}', "[" * 5000, '{"plan_id": 1, "state": "training"}']
)
def test_damaged_status_becomes_a_number_when_reported(limits, status):
    (limits.site / "outbox" / "status.json").write_text(status)
    ask = StatusQuery(plan_id=PLAN, known=Status(), received=0, max_bytes=1, wait_s=0)
    report = answer(Envelope(ask), limits).message
    assert report == StatusReport(code=report.code) and report.code in (20, 21)


def test_unforeseen_error_becomes_the_number_one_when_the_disk_refuses(limits):
    shutil.rmtree(limits.site / "inbox")
    entry = IndexEntry(path="metadata/secretname.json", num_bytes=1, digest="0" * 64)
    assert answer(Envelope(Offer(plan_id=PLAN, files=(entry,))), limits) == Envelope(
        BundleProgress(code=1)
    )


def test_submission_is_not_fetched_when_it_is_larger_than_the_plan_allows(fed, limits):
    submit(limits)
    aggregator = delivery(fed, max_submission_bytes=4000)
    ask = StatusQuery(plan_id=PLAN, known=Status(), received=0, max_bytes=1000, wait_s=0)
    assert aggregator.take(ask, answer(Envelope(ask), limits)) == 0
    names = {path.name for path in (fed / "incoming" / PLAN / "north").iterdir()}
    assert names == {"status.json", "seen"}


@pytest.mark.parametrize(
    "reply",
    [
        Envelope(StatusReport()),
        Envelope(Shards(spans=(Span(path="other", offset=0, num_bytes=1),)), b"x"),
        Envelope(Shards()),
        Envelope(Shards(spans=(Span(path="sketch.safetensors", offset=0, num_bytes=2),)), b"xx"),
        Envelope(BundleProgress(missing=(Span(path="other", offset=0, num_bytes=1),))),
    ],
)
def test_answer_is_refused_when_it_does_not_fit_the_request(fed, limits, reply):
    submit(limits)
    aggregator = delivery(fed)
    request = Pull(
        plan_id=PLAN, sequence=1, spans=(Span(path="sketch.safetensors", offset=0, num_bytes=1),)
    )
    if isinstance(reply.message, BundleProgress):
        (offer, *_) = aggregator.next_requests([], 4)
        request = offer.message
    with pytest.raises(FormatError):
        aggregator.take(request, reply)
