"""Junk in the folders where strangers' bytes arrive: it stays little, and never hides a genuine plan or receipt."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.transfer.delivery import SiloDelivery, TransferLimits, load_bundle
from ddm.errors import (
    BusyError,
    DigestError,
    DocumentError,
    PolicyError,
    ReplayError,
    RollbackError,
    SignatureError,
)
from ddm.io.locks import hold_for_reading
from ddm.transport.messages import (
    Envelope,
    IndexEntry,
    Offer,
    ReceiptDelivery,
    Span,
    Status,
    StatusQuery,
    StatusReport,
)
from ddm.transport.shards import list_folder, read_spans, whole_spans
from silo.courier.handlers import SiteLimits, answer
from silo.courier.inbox import MAX_UNVERIFIED, Inbox, usage
from silo.worker.worker import Worker
from tests.support.bundles import Signer, site_settings
from tests.support.federation import PlannedFederation
from tests.support.submissions import SILO

SHARD = 40_000
BUNDLE_BYTES = 400_000
CAP_BYTES = 1_000_000
CAP_FILES = 80
PLAN = "digits-3f9a1c2e"


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "tuf")


@pytest.fixture
def limits(tmp_path: Path, signer: Signer) -> SiteLimits:
    site = tmp_path / "site"
    for name in ("inbox", "outbox", "courier"):
        (site / name).mkdir(parents=True)
    site_settings(site)
    (site / "courier" / "1.root.json").write_bytes(signer.root)
    return SiteLimits(
        site, BUNDLE_BYTES, SHARD, 10**6, inbox_bytes=CAP_BYTES, inbox_files=CAP_FILES
    )


def signed(signer: Signer, tmp_path: Path, plan_id: str, num_bytes: int = 150_000) -> Path:
    """The aggregator's folder of a newly signed plan."""
    fed = tmp_path / f"fed-{plan_id}"
    signer.sign(
        fed / "plans" / plan_id / "bundle",
        plan_id,
        {"plan/centroids.safetensors": os.urandom(num_bytes)},
    )
    return fed


def deliver(
    fed: Path, plan_id: str, limits: SiteLimits, *, between: Callable[[], object] = lambda: None
) -> list[int]:
    """Offer a plan as the aggregator does until the silo holds it or 30 messages were sent; return the codes."""
    index = load_bundle(fed / "plans" / plan_id / "bundle")
    transfer = TransferLimits(shard_bytes=SHARD, max_submission_bytes=10**6, wait_s=0)
    sender = SiloDelivery(
        fed,
        plan_id,
        "north",
        index=index,
        limits=transfer,
    )
    codes: list[int] = []
    while len(codes) < 30:
        offers = [
            envelope
            for envelope in sender.next_requests([], 4)
            if isinstance(envelope.message, Offer)
        ]
        if not offers:
            return codes
        for envelope in offers:
            between()
            codes.append(sender.take(envelope.message, answer(envelope, limits)))
    return codes


def arrived(fed: Path, plan_id: str, limits: SiteLimits) -> bool:
    """Whether the inbox holds exactly what was signed."""
    bundle = limits.site / "inbox" / plan_id / "bundle"
    folders = (bundle, fed / "plans" / plan_id / "bundle")
    listed = [
        list_folder(folder, max_files=256, max_bytes=1 << 30, with_digest=True)
        for folder in folders
        if folder.exists()
    ]
    return len(listed) == 2 and listed[0] == listed[1]


def offer(folder: Path, plan_id: str, limits: SiteLimits) -> int:
    """Offer a whole folder in one message, whatever is in it; return the silo's code."""
    files = list_folder(folder, max_files=256, max_bytes=1 << 30, with_digest=True)
    spans = tuple(whole_spans(files))
    request = Envelope(Offer(plan_id=plan_id, files=files, spans=spans), read_spans(folder, spans))
    return answer(request, replace(limits, shard_bytes=1 << 30)).message.code


def junk(
    folder: Path, plan_id: str, *, num_bytes: int = 100_000, partial: bool = False
) -> Envelope[Offer]:
    """What somebody without a key can offer: nonsense in the form of a bundle, or the beginning of one."""
    shutil.rmtree(folder, ignore_errors=True)
    names = ("metadata/1.root.json", "metadata/timestamp.json", f"targets/{plan_id}/plan.json")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(num_bytes // len(names)))
    files = list_folder(folder, max_files=256, max_bytes=1 << 30, with_digest=True)
    spans = tuple(whole_spans(files))[slice(1, 2) if partial else slice(0, 3)]
    return Envelope(Offer(plan_id=plan_id, files=files, spans=spans), read_spans(folder, spans))


@pytest.mark.parametrize("partial", [False, True])
def test_genuine_plan_gets_in_after_a_flood_of_plans_that_nobody_signed(
    partial: bool, signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    """More than the inbox holds, by bytes and by files."""
    for number in range(40):
        code = answer(
            junk(tmp_path / "junk", f"flood-{number:08x}", partial=partial), limits
        ).message.code
        assert partial or code
    num_bytes, num_files = usage(limits.site / "inbox")
    assert num_bytes <= MAX_UNVERIFIED * 100_000 and num_files <= CAP_FILES
    fed = signed(signer, tmp_path, PLAN)
    assert set(deliver(fed, PLAN, limits)) == {0} and arrived(fed, PLAN, limits)
    assert [
        path.name for path in (limits.site / "inbox").iterdir() if (path / "bundle").exists()
    ] == [PLAN]


def test_genuine_plan_gets_in_when_junk_under_its_name_came_first_and_keeps_coming(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    assert answer(junk(tmp_path / "junk", PLAN), limits).message.code
    fed = signed(signer, tmp_path, PLAN)
    codes = deliver(
        fed,
        PLAN,
        limits,
        between=lambda: answer(junk(tmp_path / "junk", PLAN, partial=True), limits),
    )
    assert set(codes) == {0} and arrived(fed, PLAN, limits)


def test_complete_junk_under_the_name_of_a_plan_goes_and_the_plan_gets_in(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    """As code that ran as the courier may have left it."""
    fed = signed(signer, tmp_path, PLAN)
    junk(limits.site / "inbox" / PLAN / "bundle", PLAN)
    assert set(deliver(fed, PLAN, limits)) == {0} and arrived(fed, PLAN, limits)


def test_no_byte_beside_the_metadata_is_kept_before_the_root_vouches_for_it(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    bundle = signed(signer, tmp_path, PLAN) / "plans" / PLAN / "bundle"
    (bundle / "targets" / PLAN / "plan" / "centroids.safetensors").write_bytes(os.urandom(150_000))
    assert offer(bundle, PLAN, limits) == DigestError.exit_code, "another file than the signed one"
    (bundle / "targets" / PLAN / "more").write_bytes(b"unlisted")
    assert offer(bundle, PLAN, limits) == DigestError.exit_code
    other = Signer(tmp_path / "other")
    assert offer(
        signed(other, tmp_path, "other-3f9a1c2e") / "plans/other-3f9a1c2e/bundle",
        "other-3f9a1c2e",
        limits,
    )
    renamed = signed(signer, tmp_path, "right-3f9a1c2e") / "plans/right-3f9a1c2e/bundle"
    assert offer(renamed, "wrong-3f9a1c2e", limits) == DocumentError.exit_code
    assert not list((limits.site / "inbox").iterdir())


@pytest.mark.parametrize(
    "path", ["metadata/app.0badc0de/evil.py", "metadata/app/pyproject.toml", "metadata/evil.py"]
)
def test_no_folder_arrives_among_the_metadata(
    path: str, signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    """Metadata are stored before anything has verified, and are kept while one of them is missing."""
    bundle = signed(signer, tmp_path, PLAN) / "plans" / PLAN / "bundle"
    (bundle / path).parent.mkdir(exist_ok=True)
    (bundle / path).write_bytes(b"app = 1")
    assert offer(bundle, PLAN, limits) == DocumentError.exit_code
    assert not list((limits.site / "inbox").iterdir())


def test_older_plan_is_refused_after_a_newer_one_and_goes_unless_the_worker_is_at_it(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    plans = [f"digits-{number:08x}" for number in range(4)]
    feds = {plan: signed(signer, tmp_path, plan) for plan in plans}
    for plan in plans[:3]:
        assert set(deliver(feds[plan], plan, limits)) == {0}
    inbox = limits.site / "inbox"
    assert {path.name for path in inbox.iterdir()} == {plans[2]}, (
        "each took the place of the one before"
    )
    assert RollbackError.exit_code in deliver(feds[plans[0]], plans[0], limits)
    assert {path.name for path in inbox.iterdir()} == {plans[2]}
    status = f'{{"plan_id": "{plans[2]}", "state": "training", "progress": 1, "sequence": 1}}'
    (limits.site / "outbox" / "status.json").write_text(status)
    assert set(deliver(feds[plans[3]], plans[3], limits)) == {0}
    assert {path.name for path in inbox.iterdir()} == set(plans[2:]) and arrived(
        feds[plans[2]], plans[2], limits
    )


def test_plan_that_is_being_read_is_neither_removed_nor_replaced(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    first, second = (
        signed(signer, tmp_path, plan) for plan in ("first-00000001", "second-00000002")
    )
    deliver(first, "first-00000001", limits)
    renewed = signed(signer, tmp_path / "renewed", "first-00000001")
    with hold_for_reading(limits.site / "inbox" / "first-00000001"):
        assert set(deliver(second, "second-00000002", limits)) == {0}
        assert arrived(first, "first-00000001", limits)
        assert BusyError.exit_code in deliver(renewed, "first-00000001", limits)
        assert arrived(first, "first-00000001", limits)
    assert set(deliver(renewed, "first-00000001", limits)) == {0} and arrived(
        renewed, "first-00000001", limits
    )


def test_inbox_holds_no_more_than_the_site_allows(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    fed = signed(signer, tmp_path, PLAN)
    for tight in (replace(limits, inbox_bytes=100_000), replace(limits, inbox_files=10)):
        assert PolicyError.exit_code in deliver(fed, PLAN, tight)
        assert usage(limits.site / "inbox")[0] <= 100_000
    assert set(deliver(fed, PLAN, limits)) == {0}


def test_what_does_not_belong_into_the_inbox_goes_and_nothing_beyond_it(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    fed = signed(signer, tmp_path, PLAN)
    inbox = limits.site / "inbox"
    deliver(fed, PLAN, limits)
    precious = tmp_path / "precious"
    (precious / "bundle").mkdir(parents=True)
    (precious / "bundle" / "file").write_text("kept")
    (inbox / "linked-00000001").symlink_to(precious)
    (inbox / PLAN / "door").symlink_to(precious)
    (inbox / PLAN / "receipts").mkdir()
    (inbox / PLAN / "receipts" / "1.json").symlink_to(precious / "bundle" / "file")
    (inbox / "..odd").mkdir()
    (inbox / "file").write_bytes(bytes(1000))
    stale = inbox / "stale-00000001" / ("0" * 16 + ".part")
    stale.mkdir(parents=True)
    os.utime(stale, (0, 0))
    os.mkfifo(inbox / PLAN / "pipe")
    for number in range(50):
        (inbox / f"empty-{number:08x}" / "bundle").mkdir(parents=True)
    Inbox(limits.site, CAP_BYTES, CAP_FILES).clean()
    assert {path.relative_to(inbox).as_posix() for path in inbox.glob("*/*")} == {
        f"{PLAN}/bundle",
        f"{PLAN}/receipts",
    }
    assert not list((inbox / PLAN / "receipts").iterdir()) and len(list(inbox.iterdir())) == 1
    assert (precious / "bundle" / "file").read_text() == "kept"


def test_only_a_receipt_that_the_plan_s_key_signed_for_this_submission_is_kept(
    signer: Signer, limits: SiteLimits, tmp_path: Path
) -> None:
    """A forged one that came first once stood in the genuine one's place for ever."""
    fed = signed(signer, tmp_path, PLAN)
    deliver(fed, PLAN, limits)
    (limits.site / "outbox" / PLAN / "1").mkdir(parents=True)
    bundle = limits.site / "inbox" / PLAN / "bundle"
    path = limits.site / "inbox" / PLAN / "receipts" / "1.json"

    def send(receipt: bytes, sequence: int = 1) -> int:
        return answer(
            Envelope(ReceiptDelivery(plan_id=PLAN, sequence=sequence), receipt), limits
        ).message.code

    assert send(os.urandom(500)) == DocumentError.exit_code
    assert send(b"{" * 1_000_000) == DocumentError.exit_code
    assert send(signer.receipt(bundle, PLAN, key="plans")) == SignatureError.exit_code
    assert send(signer.receipt(bundle, PLAN, "south")) == ReplayError.exit_code
    assert send(signer.receipt(bundle, PLAN, sequence=2)) == ReplayError.exit_code
    assert send(signer.receipt(bundle, PLAN, plan_digest="1" * 64)) == ReplayError.exit_code
    assert not path.exists()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"left by code that ran as the courier")
    genuine = signer.receipt(bundle, PLAN)
    assert send(genuine) == 0 and path.read_bytes() == genuine
    assert send(genuine) == 0
    assert send(signer.receipt(bundle, PLAN, submission_digest="2" * 64)) == ReplayError.exit_code
    assert path.read_bytes() == genuine


# The worker, when code that ran as the courier has filled the inbox


def test_worker_finds_the_genuine_plan_among_junk_and_copies_none_of_it(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny, plan_id = planned_once.copy(tmp_path / "tiny")
    site = tiny.sites[SILO]
    for number in range(12):
        bundle = site.inbox / f"aaaa-{number:08x}" / "bundle"
        junk(bundle, bundle.parent.name, num_bytes=3000)
        with (bundle / "targets" / "large").open("wb") as stream:
            stream.truncate(1 << 30)
        os.utime(bundle, (0, 0))
    (site.inbox / "link-00000001").symlink_to(site.private)
    (site.inbox / "file-00000001").touch()
    most = 0
    worker = Worker(site, tiny.key(SILO), lambda state: None)
    for _ in range(100):
        worker.step()
        most = max(
            most,
            *(
                usage(path)[0]
                for path in (site.private / "plans").glob("*")
                if path.name != plan_id
            ),
            0,
        )
        if worker.state.state == "plan_accepted":
            break
    assert worker.state.plan_id == plan_id and worker.state.state == "plan_accepted"
    assert most == 0 and {path.name for path in (site.private / "plans").iterdir()} == {plan_id}


def test_worker_takes_a_plan_whose_name_junk_had_before(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    """Without a restart: what was refused was those bytes, not the name."""
    tiny, plan_id = planned_once.copy(tmp_path / "tiny")
    site = tiny.sites[SILO]
    bundle = site.inbox / plan_id / "bundle"
    bundle.rename(tmp_path / "genuine")
    junk(bundle, plan_id)
    entered: list[str] = []
    worker = Worker(site, tiny.key(SILO), lambda state: entered.append(state.state))
    worker.step()
    worker.step()
    assert entered == ["plan_refused"], "it is not looked at twice"
    shutil.rmtree(bundle)
    (tmp_path / "genuine").rename(bundle)
    worker.step()
    assert entered == ["plan_refused", "plan_accepted"]


# The aggregator's incoming folder


def test_silo_that_announces_one_submission_after_another_holds_the_place_of_one(
    tmp_path: Path,
) -> None:
    """Each announcement, of as much as the plan allows, began a folder of its own."""
    (tmp_path / "plans" / PLAN / "bundle").mkdir(parents=True)
    delivery = SiloDelivery(
        tmp_path,
        PLAN,
        "north",
        index=(),
        limits=TransferLimits(shard_bytes=SHARD, max_submission_bytes=BUNDLE_BYTES, wait_s=0),
    )
    ask = StatusQuery(plan_id=PLAN, known=Status(), received=0, max_bytes=SHARD, wait_s=0)
    for sequence in range(1, 16):
        files = (IndexEntry(path="expert", num_bytes=BUNDLE_BYTES),)
        spans = (Span(path="expert", offset=BUNDLE_BYTES - SHARD, num_bytes=SHARD),)
        report = StatusReport(status=Status(), sequence=sequence, files=files, spans=spans)
        delivery.take(ask, Envelope(report, bytes(SHARD)))
    parts = list((tmp_path / "incoming" / PLAN / "north").glob("*.part"))
    assert len(parts) == 1, "of the newest"
    assert usage(tmp_path / "incoming")[0] < BUNDLE_BYTES + 10_000
