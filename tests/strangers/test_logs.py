"""What a stranger sends is not repeated: not in an error, a log, a receipt, a reply, nor on the operator's screen."""

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.app.message.message import Metadata

from aggregator.config import Federation
from aggregator.intake.service import IntakeService
from aggregator.membership.registry import enroll_silo
from aggregator.server_app import FlowerCarrier
from ddm.errors import ArchipelagoError, DocumentError, FormatError, ReplayError
from ddm.io.settings import load_settings
from ddm.io.tensors import TensorSpec, check_file, read_header
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import RECEIPT_KIND, Receipt
from ddm.publishing.keys import load_key
from ddm.system.console import fail, say
from ddm.transport.flower import decode_reply, encode
from ddm.transport.messages import StatusReport
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey
from ddm.trust.sealed_documents import ReceiptBinding
from ddm.trust.silo_role import sign_silo_metadata
from silo.client_app import app, handle
from silo.config import SiloSettings
from silo.courier.handlers import SiteLimits
from silo.setup import read_invitation
from silo.worker.receipts import find_receipt
from tests.strangers.test_bounds import tensors
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.federation import PASSPHRASE, PlannedFederation, TinyFederation
from tests.support.mutations import json_paths, replace_at, value_at
from tests.support.parsers import (
    KEY,
    MAX_SHARD_BYTES,
    NOW,
    REQUESTS,
    ParserCase,
    document_parsers,
    message_parsers,
    receipt_document,
    submission_document,
)

SALT = bytes(16)
# As text that may not be there, and as text that could be a name.
CANARIES = ("CANARY\x1b[2J\r\n\u202e\u2028\x9b", "canary")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def spoilt(sample: bytes) -> list[bytes]:
    """The sample with a canary in every place: as a value, as a name, and as a name with the value that was there."""
    value = json.loads(sample)
    spoiled = []
    for place in json_paths(value):
        for canary in CANARIES:
            spoiled.append(replace_at(value, place, canary))
            spoiled.append(replace_at(value, place, [canary]))
            if isinstance(parent := value_at(value, place), dict):
                spoiled.append(replace_at(value, place, {**parent, canary: 0}))
                spoiled += [
                    replace_at(value, place, {**parent, canary: one})
                    for one in list(parent.values())[:2]
                ]
    return [json.dumps(one, sort_keys=True, separators=(",", ":")).encode() for one in spoiled]


def silent(text: str) -> None:
    assert "canary" not in text.lower(), text[:300]
    assert not CONTROL.search(text), ascii(text[:300])


def test_error_says_nothing_that_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    for name in {**document_parsers(), **message_parsers()}:
        with case(name=name):
            door: ParserCase = {**document_parsers(), **message_parsers()}[name]
            refusals = 0
            for data in spoilt(door.sample):
                try:
                    door.parse(data)
                except door.refusals as error:
                    refusals += 1
                    fail(error)
                    silent(f"{error} {error.remedy}")
            assert refusals
            silent(capsys.readouterr().err)


def test_screen_shows_control_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    for canary in CANARIES:
        say(f"said: {canary}")
    shown = capsys.readouterr().out
    assert "CANARY\\x1b[2J" in shown and not CONTROL.search(shown), ascii(shown)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS = {
    "name": {"CANARY\x1b": ENTRY},
    "name that could be one": {"canary": ENTRY},
    "dtype": {"a": ENTRY | {"dtype": "CANARY\x1b"}},
    "shape": {"a": ENTRY | {"shape": ["CANARY\x1b"]}},
    "offsets": {"a": ENTRY | {"data_offsets": ["CANARY\x1b", 0]}},
    "field": {"a": ENTRY | {"CANARY\x1b": 0}},
    "entry": {"a": "CANARY\x1b"},
    "name of a spoilt entry": {"CANARY\x1b": 0},
    "name too many": {"a": ENTRY, "canary": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]}},
    "metadata": {"__metadata__": {"CANARY\x1b": 0}},
    "digits": {"a": ENTRY | {"data_offsets": [int("31337" * 100), 0]}},
}


def test_error_about_tensors_says_nothing_that_was_sent(tmp_path: Path) -> None:
    for why in HEADERS:
        with case(why=why):
            path = tmp_path / "x.safetensors"
            path.write_bytes(
                tensors(json.dumps(HEADERS[why]).encode(), b"\0" * (8 if "many" in why else 4))
            )
            with pytest.raises(ArchipelagoError) as refusal:
                check_file(path, {"a": TensorSpec("F32", (1,))}, max_bytes=1 << 20)
            silent(str(refusal.value))
            assert "31337" not in str(refusal.value)
            if not why.startswith("name"):
                with pytest.raises(ArchipelagoError) as refusal:
                    read_header(path, max_bytes=1 << 20)
                silent(str(refusal.value))


@pytest.mark.parametrize("canary", CANARIES)
def test_operator_who_is_handed_a_hostile_file_is_told_nothing_of_its_text(
    tmp_path: Path, canary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuf").mkdir()
    readers: list[Callable[[Path], object]] = [
        lambda path: read_invitation(path, "c" * 64),
        lambda path: enroll_silo(Federation(tmp_path), path),
        lambda path: load_settings(SiloSettings, path),
    ]
    for content in (
        canary,
        json.dumps({canary: canary}),
        json.dumps({"format": canary}),
        f'"{canary}" = 1',
    ):
        (tmp_path / "x").write_text(content)
        for reader in readers[:2]:
            with pytest.raises(ArchipelagoError) as refusal:
                reader(tmp_path / "x")
            fail(refusal.value)
    silent(capsys.readouterr().err)


def message(content: RecordDict) -> Message:
    metadata = Metadata(1, "message", 7, 8, "", "", 0.0, 60.0, "query")
    return Message(content=content, metadata=metadata)


def hostile_records() -> list[RecordDict]:
    """Everything odd that Flower would deliver, a canary in each."""
    bad = CANARIES[0]
    good = message_parsers()["pull"].sample.decode()
    head = ConfigRecord({"document": good, "salt": SALT})
    array = {"dtype": "uint8", "shape": (6,), "stype": "archipelago.bytes", "data": b"CANARY"}
    return [
        RecordDict({}),
        RecordDict({bad: head}),
        RecordDict({"head": ConfigRecord({bad: bad})}),
        RecordDict({"head": ConfigRecord({"document": bad, "salt": SALT})}),
        RecordDict({"head": ConfigRecord({"document": good, "salt": SALT, bad: bad})}),
        RecordDict({"head": ConfigRecord({"document": b"CANARY", "salt": SALT})}),
        RecordDict({"head": ConfigRecord({"document": [bad], "salt": SALT})}),
        RecordDict({"head": head, "data": ConfigRecord({bad: bad})}),
        RecordDict({"head": head, "data": ArrayRecord({bad: Array(**array)})}),
        RecordDict({"head": head, "data": ArrayRecord({"bytes": Array(**array | {"dtype": bad})})}),
        RecordDict({"head": head, "data": ArrayRecord({"bytes": Array(**array | {"stype": bad})})}),
        RecordDict(
            {"head": head, "data": ArrayRecord({"bytes": Array(**array | {"shape": (2**62,)})})}
        ),
        *(
            RecordDict({"head": ConfigRecord({"document": data.decode(), "salt": SALT})})
            for name in ("offer", "ask", "pull", "deliver")
            for data in spoilt(message_parsers()[name].sample)
        ),
    ]


def at_site(site: Path) -> Context:
    """What Flower tells the courier of where it is."""
    limits = {field.name: MAX_SHARD_BYTES for field in fields(SiteLimits) if field.name != "site"}
    return Context(1, 8, {**limits, "site": str(site)}, RecordDict({}), {})


def test_courier_answers_an_honest_request(tmp_path: Path) -> None:
    for name in ("inbox", "outbox"):
        (tmp_path / name).mkdir()
    reply = decode_reply(
        handle(message(encode(REQUESTS["ask"])), at_site(tmp_path)).content, max_bytes=0
    )
    assert isinstance(reply.message, StatusReport) and reply.message.code == 0


def test_courier_answers_hostile_requests_with_a_code_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("inbox", "outbox"):
        (tmp_path / name).mkdir()
    context = at_site(tmp_path)
    for records in hostile_records():
        reply = handle(message(records), context).content
        assert set(reply) == {"head"}
        refusal = json.loads(str(reply["head"]["document"]))
        assert refusal["code"] in (
            FormatError.exit_code,
            DocumentError.exit_code,
            ReplayError.exit_code,
        ), refusal
        silent(json.dumps(refusal))
    assert not list(tmp_path.glob("*/*"))
    captured = capsys.readouterr()
    silent(captured.out + captured.err + caplog.text)


@pytest.mark.parametrize("kind", ["exec", "train", "evaluate", "__reduce__"])
def test_courier_knows_no_request_that_carries_code(tmp_path: Path, kind: str) -> None:
    context = at_site(tmp_path)
    code = {"kind": kind, "plan_id": "digits-3f9a1c2e", "code": "import os; os.mkdir('owned')"}
    reply = handle(
        message(RecordDict({"head": ConfigRecord({"document": json.dumps(code), "salt": SALT})})),
        context,
    ).content
    assert json.loads(str(reply["head"]["document"]))["code"] == DocumentError.exit_code
    request = message(
        RecordDict({"head": ConfigRecord({"document": json.dumps(code), "salt": SALT})})
    )
    request.metadata.message_type = kind if kind in ("train", "evaluate") else "train"
    with pytest.raises(ValueError, match="No .* function registered"):
        app(request, context)
    assert not list(tmp_path.iterdir())


class _Answers:
    """Flower's connection, for one answer that has arrived."""

    def __init__(self, answer: Message) -> None:
        self._answer = answer

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [self._answer]


def test_server_says_nothing_of_a_hostile_answer() -> None:
    for records in hostile_records():
        carrier = FlowerCarrier(_Answers(message(records)), MAX_SHARD_BYTES)  # type: ignore[arg-type]
        with pytest.raises(ArchipelagoError) as refusal:
            carrier.fetch("message")
        silent(str(refusal.value))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """A federation whose plan is signed and which nobody has answered."""
    made = TinyFederation.create(tmp_path_factory.mktemp("strangers"), {"north": 60})
    return PlannedFederation(made, made.sign())


def signed(
    tiny: TinyFederation, plan_id: str, number: int, document: bytes, extra: dict[str, bytes]
) -> dict[str, bytes]:
    """A submission as an enrolled silo that cheats would sign it."""
    base = f"{plan_id}/silos/north/"
    files = {
        f"{base}submission.json": document,
        **{f"{base}{name}": data for name, data in extra.items()},
    }
    listed = {name: (len(data), sha256_hex(data)) for name, data in files.items()}
    role = sign_silo_metadata(
        plan_id,
        "north",
        listed,
        tiny.key("north"),
        root_digest=tiny.federation.root_digest,
        version=number,
        now=NOW,
    )
    targets = {name.removeprefix(f"{plan_id}/"): data for name, data in files.items()}
    return {f"metadata/{plan_id}.north.json": role, **targets}


def signed_hostile(tiny: TinyFederation, plan_id: str) -> list[dict[str, bytes]]:
    bad = CANARIES[0]
    document = submission_document() | {
        "root_digest": tiny.federation.root_digest,
        "plan_id": plan_id,
    }
    spoils: list[Any] = [
        {bad: bad},
        document | {bad: bad},
        document | {"silo_id": bad},
        document | {"statistics": [{"kind": bad}]},
        document | {"software": {bad: 1}},
        document | {"experts": [{bad: bad}]},
        document | {"plan_digest": bad},
        bad,
    ]
    made = [
        signed(tiny, plan_id, number, json.dumps(spoil).encode(), {})
        for number, spoil in enumerate(spoils, 1)
    ]
    return made


def hostile_unanswered(tiny: TinyFederation, plan_id: str, number: int) -> list[dict[str, bytes]]:
    """Submissions that the silo did not sign, or with a path that it may not sign."""
    bad = CANARIES[0]
    document = submission_document() | {"plan_id": plan_id}
    more = {"experts/CANARY/expert.safetensors": b"CANARY"}
    return [
        signed(tiny, plan_id, number, json.dumps(document).encode(), more),
        {f"metadata/{plan_id}.north.json": json.dumps({bad: bad}).encode()},
        {f"metadata/{plan_id}.north.json": bad.encode()},
        {
            f"metadata/{plan_id}.north.json": json.dumps(
                {"signatures": [], "signed": {"targets": {bad: 0}}}
            ).encode()
        },
        {"a\nCANARY\x1b[2J": b"CANARY"},
        {"\udcff\udcfe": b"CANARY"},
    ]


def test_intake_refuses_every_hostile_submission_answers_no_unsigned_one_and_repeats_nothing_of_either(
    tiny: PlannedFederation,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    federation = tiny[0].federation
    plan_id = tiny[1]
    incoming = federation.incoming / plan_id / "north"
    receipts = federation.receipts / plan_id / "north"
    key = load_key(federation, "receipts", PASSPHRASE)

    def printed(receipt: Receipt) -> None:
        say(f"{receipt.silo_id}: {getattr(receipt.verdict, 'reason', 'accepted')}")

    def arrive(number: int, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            path = incoming / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        IntakeService(federation, key, printed).step()

    attacks = signed_hostile(*tiny)
    for number, files in enumerate(attacks, 1):
        arrive(number, files)
        payload, _ = open_sealed(
            (receipts / f"{number}.json").read_bytes(), RECEIPT_KIND, key.public, 65536
        )
        receipt = Receipt.parse(payload, subject="receipt")
        assert receipt.verdict.kind == "refused", number
        silent(receipt.verdict.reason)
    beyond = len(attacks) + 1
    for files in hostile_unanswered(*tiny, beyond):
        arrive(beyond, files)
    (incoming / str(beyond)).mkdir()
    (incoming / str(beyond) / "x\nCANARY\x1b").symlink_to("/etc/passwd")
    arrive(beyond, {})
    assert not (receipts / f"{beyond}.json").exists()
    assert not (incoming / str(beyond)).exists()
    captured = capsys.readouterr()
    silent(captured.out + captured.err + caplog.text)
    assert captured.out.count("\n") == len(attacks)
    assert not list((federation.accepted / plan_id).glob("north*"))


ODD_NUMBERS = {
    "file for a folder": "18",
    "link": "19",
    "pipe": "20",
    "other digits": "1\u0661",
    "superscript": "1\u00b2",
}


@pytest.mark.parametrize("odd", ODD_NUMBERS)
def test_intake_survives_an_incoming_folder_of_odd_things(
    tiny: PlannedFederation, odd: str
) -> None:
    federation = tiny[0].federation
    plan_id = tiny[1]
    path = federation.incoming / plan_id / "north" / ODD_NUMBERS[odd]
    path.parent.mkdir(parents=True, exist_ok=True)
    if odd == "link":
        path.symlink_to("/etc")
    elif odd == "pipe":
        os.mkfifo(path)
    elif odd == "file for a folder":
        path.write_text("x")
    else:
        path.mkdir()
    IntakeService(
        federation, load_key(federation, "receipts", PASSPHRASE), lambda receipt: None
    ).step()
    assert Path("/etc/passwd").exists()


def test_receipt_by_another_key_is_moved_aside_unread(tmp_path: Path) -> None:
    plan = Plan.parse(to_bytes(plan_document(receipt_key=str(KEY.public))), subject="plan")
    binding = ReceiptBinding(plan.plan_id, plan.digest, "north", 1)
    verdict = {"kind": "refused", "code": 21, "reason": "a reason"}
    binding_fields = {
        "plan_id": plan.plan_id,
        "plan_digest": plan.digest,
        "silo_id": "north",
        "sequence": 1,
        "verdict": verdict,
    }
    receipt = json.dumps(receipt_document() | binding_fields).encode()
    path = tmp_path / "1.json"
    for stranger, kind in ((SigningKey.generate(), RECEIPT_KIND), (KEY, "card")):
        path.write_bytes(seal(receipt, kind, stranger))
        assert find_receipt(path, plan, binding, tmp_path / "submission.json") is None
        assert not path.exists()
    path.write_bytes(seal(receipt, RECEIPT_KIND, KEY))
    accepted = find_receipt(path, plan, binding, tmp_path / "submission.json")
    assert accepted is not None and accepted.verdict.kind == "refused"
