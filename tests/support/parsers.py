"""Everything that is parsed from outside: one honest sample of each, its parser, and the errors it may refuse with."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from tuf.api.metadata import MetaFile, Role, Root, Snapshot, Targets, Timestamp

from ddm.errors import ArchipelagoError, DocumentError, FormatError, SignatureError, TrustError
from ddm.protocol.base import Document, now_utc, sha256_hex
from ddm.protocol.enrolment import (
    MAX_ROTATION_BYTES,
    Card,
    Invitation,
    KeyHistory,
    KeyRotation,
    RotatedCard,
)
from ddm.protocol.island import Island
from ddm.protocol.leave import Leave
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Receipt
from ddm.protocol.submission import Submission
from ddm.training.job import Heartbeat, Launch, ProcessFailure, TrainingJob, TrainingResult
from ddm.transport.flower import decode_reply, decode_request, encode
from ddm.transport.messages import (
    BundleProgress,
    Envelope,
    IndexEntry,
    Offer,
    Pull,
    ReceiptDelivery,
    ReceiptStored,
    Shards,
    Span,
    Status,
    StatusQuery,
    StatusReport,
)
from ddm.trust.ceremony import HolderSignature, SigningRequest
from ddm.trust.drafts import Delegates, draft_targets
from ddm.trust.envelope import _Envelope, open_sealed, seal
from ddm.trust.key_rotation import open_rotation, seal_rotation
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import Checkpoint, cosign, open_checkpoint, sign_checkpoint
from ddm.trust.log.entries import MAX_ENTRY_BYTES, SiloEnrolled, encode_entry, parse_entry
from ddm.trust.log.merkle import inclusion_proof, leaf_hash, root_hash
from ddm.trust.log.note import COSIGNATURE, SignedNote, VerifierKey
from ddm.trust.log.proof import ConsistencyProofs, InclusionProof
from ddm.trust.log.tiles import encode_bundle, parse_bundle
from ddm.trust.log.witness import add_cosignatures, parse_size
from ddm.trust.metadata import (
    LIMITS,
    METADATA_LIFE,
    expiry,
    parse_metadata,
    payload_of,
    sign_metadata,
)
from ddm.trust.silo_role import sign_silo_metadata, verify_silo_metadata
from tests.support.documents import plan_document

PLAN = "digits-3f9a1c2e"
KEY = SigningKey.generate()
NEXT_KEY = SigningKey.generate()
NOW = now_utc()
DIGEST = "c" * 64
MAX_SHARD_BYTES = 4096
LIMIT = 4 * 1024 * 1024
_WHEN = NOW.isoformat()


@dataclass(frozen=True)
class ParserCase:
    """One way in.

    Attributes:
        sample: what an honest sender sends.
        parse: reads it.
        refusals: what a stranger's bytes may raise, and nothing else.
        encode_parsed: writes what was parsed, for parsers whose result can be written.
        limit: most bytes it reads.
    """

    sample: bytes
    parse: Callable[[bytes], Any]
    refusals: tuple[type[ArchipelagoError], ...] = (DocumentError,)
    encode_parsed: Callable[[Any], bytes] | None = None
    limit: int = LIMIT


def file_of(path: str) -> dict[str, Any]:
    """Describe a file as documents do."""
    return {"path": path, "bytes": 8448, "digest": DIGEST}


_WAIVER = {
    "role": "head of data",
    "reason": "made up",
    "plan_digest": DIGEST,
    "verdict": "inconclusive",
    "expires_at": "2099-01-01T00:00:00Z",
}


def submission_document() -> dict[str, Any]:
    """A submission with every optional part filled in."""
    price = {"epsilon": 1.0, "delta": 1e-5}
    return {
        "format": "archipelago/submission/1",
        "root_digest": DIGEST,
        "plan_id": PLAN,
        "plan_digest": DIGEST,
        "silo_id": "north",
        "sequence": 1,
        "created_at": _WHEN,
        "num_units": 240,
        "isolation": "none",
        "experts": [
            {
                "expert_id": "north-1",
                "cluster": 1,
                "num_images": 240,
                "steps": 1500,
                "file": file_of("silos/north/experts/north-1/expert.safetensors"),
                "training": {"seconds": 12.0, "flops": 1e12},
                "privacy": {"kind": "none"},
            }
        ],
        "statistics": [
            {"kind": "counts", **price, "file": file_of("counts.safetensors")},
            {"kind": "sketch", **price, "file": file_of("sketch.safetensors")},
            {"kind": "class_counts", **price, "file": file_of("class_counts.safetensors")},
        ],
        "spent": {**price, "unit": "image", "relation": "replace_one"},
        "ledger": {"head_digest": DIGEST, "num_entries": 2, "chain": ["a" * 64, DIGEST]},
        "audit": {"verdict": "waived", "digest": DIGEST, "waiver": _WAIVER},
        "approval": {"kind": "person", "at": _WHEN},
        "software": {"torch": "2.13.0"},
    }


def manifest_document() -> dict[str, Any]:
    """A manifest of one silo."""
    expert = file_of("silos/north/experts/north/expert.safetensors")
    router = {"kind": "learned", "t_release": 0.5, "training_prior": [1.0], "temperature": 1.0}
    return {
        "format": "archipelago/manifest/1",
        "plan_id": PLAN,
        "plan_digest": DIGEST,
        "version": 2,
        "supersedes_digest": DIGEST,
        "published_at": _WHEN,
        "licence": "CC-BY-4.0",
        "cite": "somebody",
        "missing_silos": ["east"],
        "withdrawn_silos": ["west"],
        "silos": [
            {
                "silo_id": "north",
                "submission": file_of("silos/north/submission.json"),
                "key_fingerprint": DIGEST,
                "epsilon": 8.0,
                "delta": 1e-5,
                "audit": "waived",
                "isolation": "none",
                "units": 129,
                "units_reason": "a reason",
            }
        ],
        "experts": [
            {"expert_id": "north", "silo_id": "north", "cluster": 0, "prior": 1.0, "file": expert}
        ],
        "router": {**router, "file": file_of("router.safetensors")},
        "evaluation": [{"metric": "nats", "value": 1.0, "low": 0.5, "high": 1.5}],
        "files": [file_of("README.md")],
    }


def receipt_document() -> dict[str, Any]:
    """A refusal."""
    return {
        "format": "archipelago/receipt/1",
        "plan_id": PLAN,
        "plan_digest": DIGEST,
        "silo_id": "north",
        "sequence": 1,
        "submission_digest": DIGEST,
        "verdict": {"kind": "refused", "code": 21, "reason": "a reason"},
        "at": _WHEN,
    }


def card_document() -> dict[str, Any]:
    """A silo's public keys."""
    return {
        "format": "archipelago/card/1",
        "root_digest": DIGEST,
        "silo_id": "north",
        "signing_key": str(KEY.public),
        "node_key": "ecdsa-sha2-nistp256 AAAAE2VjZHNh",
        "agreed": {"images": 1024, "patients": 256},
        "limits": {"privacy": {"unit": "patient", "max_epsilon": 8.0}},
        "created_at": _WHEN,
    }


def rotation_document() -> dict[str, Any]:
    """A silo's change of keys."""
    return {
        "format": "archipelago/key-rotation/1",
        "root_digest": DIGEST,
        "silo_id": "north",
        "number": 1,
        "old_key": str(KEY.public),
        "new_key": str(NEXT_KEY.public),
        "at": _WHEN,
    }


@cache
def metadata() -> Mapping[str, bytes]:
    """One signed TUF file of each kind."""
    tuf_key = KEY.public.tuf_key()
    until = expiry(NOW, METADATA_LIFE)
    roles = {
        name: Role([tuf_key.keyid], 1) for name in ("root", "timestamp", "snapshot", "targets")
    }
    listed = MetaFile(1, 100, {"sha256": DIGEST})
    made = {
        "root": Root(1, None, until, {tuf_key.keyid: tuf_key}, roles, False),
        "targets": draft_targets(
            1, Delegates(KEY.public, KEY.public, PLAN, {"north": KEY.public}), now_utc()
        ),
        "snapshot": Snapshot(1, None, until, {"targets.json": listed}),
        "timestamp": Timestamp(1, None, until, listed),
    }
    return {kind: sign_metadata(signed, [KEY]) for kind, signed in made.items()}


@cache
def silo_role() -> bytes:
    """What a silo signs of its submission."""
    base = f"{PLAN}/silos/north"
    files = {
        f"{base}/submission.json": (100, DIGEST),
        f"{base}/experts/north/expert.safetensors": (100, DIGEST),
    }
    return sign_silo_metadata(PLAN, "north", files, KEY, root_digest=DIGEST, version=1, now=NOW)


def island_document() -> dict[str, Any]:
    """What an island of one owner states: a part of a submission."""
    whole = submission_document()
    kept = (
        "root_digest",
        "plan_id",
        "plan_digest",
        "silo_id",
        "created_at",
        "num_units",
        "software",
    )
    expert = whole["experts"][0] | {"privacy": {"kind": "none"}}
    return {name: whole[name] for name in kept} | {
        "format": "archipelago/island/1",
        "experts": [expert],
    }


def _document(kind: type[Document], sample: dict[str, Any]) -> ParserCase:
    parse = lambda data: kind.parse(data, subject="document")  # noqa: E731
    return ParserCase(
        json.dumps(sample).encode(), parse, encode_parsed=lambda value: value.encode()
    )


def _tuf(kind: type[Any], name: str) -> ParserCase:
    return ParserCase(
        metadata()[name],
        lambda data: parse_metadata(data, kind, name),
        encode_parsed=lambda value: value.to_bytes(),
        limit=LIMITS[name],
    )


def _sign_request(data: bytes) -> object:
    request = SigningRequest.parse(data, subject="request")
    return request.document(), request.replaced(), request.holders()


_EXPERT = {"path": "expert.safetensors", "bytes": 8, "digest": DIGEST}
_LOCATION = {"path": "images.npy", "dtype": "<f4", "shape": [3, 1, 8, 8], "offset": 128}
_FITTED = {"shape": [1, 8, 8], "range": [-1.0, 1.0]}
_JOB: Mapping[type[Document], dict[str, Any]] = {
    TrainingJob: {
        **{"plan_digest": DIGEST, "silo_id": "north", "number": 1, "data": DIGEST},
        **{
            "engine": {"processes": 2, "device": "cpu"},
            "base": _EXPERT | {"path": "base.safetensors"},
        },
        "images": {
            "kind": "referred",
            "locations": [_LOCATION],
            "fitted": _FITTED,
            "chosen": _LOCATION | {"dtype": "<i8"},
        },
        "labels": {"kind": "copied", "location": _LOCATION},
    },
    Launch: {
        **{
            "launch_id": "a1",
            "work": DIGEST,
            "by": "command",
            "host": "node1",
            "pid": 7,
            "started": 3,
        },
        **{"returned": 1, "futile": 1, "step": 2},
    },
    ProcessFailure: {
        **{"rank": 0, "num_processes": 2, "kind": "ours", "code": 7, "subject": "images"},
        **{"expected": "a number", "got": "none", "remedy": "Try again."},
    },
    Heartbeat: {"count": 2, "step": 3, "num_steps": 4, "loss": 0.5},
    TrainingResult: {
        "work": DIGEST,
        "steps": 3,
        "loss": 0.5,
        "seconds": 1.0,
        "flops": 1e9,
        "expert": _EXPERT,
    },
}


def _format(kind: type[Document]) -> dict[str, str]:
    return {"format": kind.model_fields["format"].default}


@cache
def document_parsers() -> Mapping[str, ParserCase]:
    """Every parser of documents and metadata, by name."""
    role = {
        "root_digest": DIGEST,
        "plan_id": PLAN,
        "silo_id": "north",
        "key": KEY.public,
        "now": NOW,
    }
    root = payload_of(parse_metadata(metadata()["root"], Root, "root").signed).decode()
    request = {
        "format": "archipelago/ceremony/1",
        "role": "root",
        "purpose": "because",
        "payload": root,
    }
    answer = {
        "format": "archipelago/holder-signature/1",
        "payload_digest": DIGEST,
        "key": str(KEY.public),
    }
    invitation = {
        "format": "archipelago/invitation/1",
        "federation": "tiny",
        "address": "127.0.0.1:9092",
        "ca_certificate": "-----BEGIN CERTIFICATE-----",
        "root": "{}",
        "root_digest": sha256_hex(b"{}"),
        "log_key": "tiny+00000000+" + "A" * 44,
        "licence": "CC0-1.0",
    }
    sealed = seal(json.dumps(receipt_document()).encode(), "receipt", KEY)
    rotation = rotation_document()
    both = seal_rotation(KeyRotation.model_validate_json(json.dumps(rotation)), KEY, NEXT_KEY)
    rotated = {
        "format": "archipelago/rotated-card/1",
        "card": sealed.decode(),
        "rotations": [both.decode()],
    }
    history = {"format": "archipelago/key-history/1", "silos": {"north": [both.decode()]}}
    return {
        "plan": _document(Plan, plan_document()),
        "submission": _document(Submission, submission_document()),
        "island": _document(Island, island_document()),
        "leave": _document(
            Leave,
            {
                "root_digest": DIGEST,
                "plan_id": PLAN,
                "silo_id": "north",
                "at": "2026-01-01T00:00:00Z",
            }
            | _format(Leave),
        ),
        **{
            f"job's {kind.__name__.lower()}": _document(kind, said | _format(kind))
            for kind, said in _JOB.items()
        },
        "manifest": _document(Manifest, manifest_document()),
        "receipt": _document(Receipt, receipt_document()),
        "card": _document(Card, card_document()),
        "invitation": _document(Invitation, invitation),
        "envelope": _document(_Envelope, json.loads(sealed)),
        "key rotation": _document(KeyRotation, rotation),
        "rotated card": _document(RotatedCard, rotated),
        "key history": _document(KeyHistory, history),
        "sealed rotation": ParserCase(
            both, open_rotation, (DocumentError, SignatureError), limit=MAX_ROTATION_BYTES
        ),
        "request": _document(SigningRequest, request | {"before": root, "root": root}),
        "holder's signature": _document(HolderSignature, answer | {"signature": "0" * 128}),
        "sealed receipt": ParserCase(
            sealed,
            lambda data: open_sealed(data, "receipt", KEY.public, 65536),
            (DocumentError, SignatureError),
        ),
        "request to sign": ParserCase(json.dumps(request).encode(), _sign_request),
        "log's consistency": _document(
            ConsistencyProofs, {"proofs": [{"size": 3, "hashes": ["A" * 43 + "="]}]}
        ),
        "log's entry": ParserCase(
            encode_entry(SiloEnrolled(silo_id="north", key_fingerprint=DIGEST)),
            lambda data: parse_entry(data, "entry"),
            encode_parsed=encode_entry,
            limit=MAX_ENTRY_BYTES,
        ),
        "root": _tuf(Root, "root"),
        "targets": _tuf(Targets, "targets"),
        "snapshot": _tuf(Snapshot, "snapshot"),
        "timestamp": _tuf(Timestamp, "timestamp"),
        "silo's role": ParserCase(
            silo_role(),
            lambda data: verify_silo_metadata(data, **role),
            (TrustError, FormatError),
            limit=256 * 1024,
        ),
    }


@cache
def log_parsers() -> Mapping[str, ParserCase]:
    """Every parser of the log's own formats, which are no JSON, by name."""
    key = VerifierKey("archipelago/digits/0123456789abcdef", KEY.public)
    lines = [
        encode_entry(SiloEnrolled(silo_id=silo, key_fingerprint=DIGEST))
        for silo in ("east", "north", "west")
    ]
    leaves = [leaf_hash(line) for line in lines]
    signed = sign_checkpoint(Checkpoint(key.name, len(leaves), root_hash(leaves)), KEY)
    proof = InclusionProof(1, tuple(inclusion_proof(leaves, 1)), signed.encode())
    refusals = (FormatError, TrustError)
    witness = VerifierKey("witness.example/one", NEXT_KEY.public, COSIGNATURE)
    cosigned = cosign(signed, witness.name, NEXT_KEY, time=1_790_000_000)
    answer = str(cosigned.note.signatures[-1]).encode()

    def checked(data: bytes) -> object:
        return InclusionProof.parse(data, "proof").check(lines[1], [key], "proof")

    return {
        "note": ParserCase(
            signed.encode(),
            lambda data: SignedNote.parse(data, "note"),
            encode_parsed=lambda note: note.encode(),
        ),
        "checkpoint": ParserCase(
            signed.encode(), lambda data: open_checkpoint(data, [key], "checkpoint"), refusals
        ),
        "proof": ParserCase(
            proof.encode(),
            lambda data: InclusionProof.parse(data, "proof"),
            encode_parsed=lambda proof: proof.encode(),
        ),
        "checked proof": ParserCase(proof.encode(), checked, refusals),
        "verifier key": ParserCase(
            str(key).encode(),
            lambda data: VerifierKey.parse(data.decode("utf-8", "replace")),
            encode_parsed=lambda verifier_key: str(verifier_key).encode(),
        ),
        "entry bundle": ParserCase(
            encode_bundle(lines),
            lambda data: parse_bundle(data, 3, "bundle"),
            encode_parsed=encode_bundle,
        ),
        "witness's answer": ParserCase(
            answer, lambda data: add_cosignatures(signed, data, witness, "answer"), refusals
        ),
        "witness's size": ParserCase(b"3\n", lambda data: parse_size(data, "answer"), refusals),
    }


_FILE = IndexEntry(path="targets/plan.json", num_bytes=6, digest=DIGEST)
_SPAN = Span(path="targets/plan.json", offset=0, num_bytes=6)
REQUESTS = {
    "offer": Envelope(Offer(plan_id=PLAN, files=(_FILE,), spans=(_SPAN,)), b"abcdef"),
    "ask": Envelope(StatusQuery(plan_id=PLAN, known=Status(), max_bytes=10, received=0, wait_s=1)),
    "pull": Envelope(Pull(plan_id=PLAN, sequence=1, spans=(_SPAN,))),
    "deliver": Envelope(ReceiptDelivery(plan_id=PLAN, sequence=1), b"{}"),
}
REPLIES = {
    "held": Envelope(BundleProgress(missing=(_SPAN,))),
    "report": Envelope(
        StatusReport(status=Status(), sequence=1, files=(_FILE,), spans=(_SPAN,)), b"abcdef"
    ),
    "shards": Envelope(Shards(spans=(_SPAN,)), b"abcdef"),
    "delivered": Envelope(ReceiptStored()),
}


def message_records(document: str, data: bytes | None) -> RecordDict:
    """Pack a document that may be anything."""
    # A salt of zeros leaves the bytes as they are.
    packed = RecordDict({"head": ConfigRecord({"document": document, "salt": bytes(16)})})
    if data:
        array = Array(dtype="uint8", shape=(len(data),), stype="archipelago.bytes", data=data)
        packed["data"] = ArrayRecord({"bytes": array})
    return packed


def _message(envelope: Envelope[Any], decode: Callable[..., Any]) -> ParserCase:
    def parse(data: bytes) -> Any:
        # Flower carries text, so bytes that are none never come this far.
        return decode(
            message_records(data.decode("utf-8", "replace"), envelope.data),
            max_bytes=MAX_SHARD_BYTES,
        )

    again = lambda message: str(encode(message)["head"]["document"]).encode()  # noqa: E731
    return ParserCase(
        envelope.message.model_dump_json().encode(), parse, encode_parsed=again, limit=1024 * 1024
    )


@cache
def message_parsers() -> Mapping[str, ParserCase]:
    """Every message between aggregator and courier, by name; its bytes travel unchanged."""
    return {name: _message(envelope, decode_request) for name, envelope in REQUESTS.items()} | {
        name: _message(envelope, decode_reply) for name, envelope in REPLIES.items()
    }
