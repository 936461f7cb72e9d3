"""No name that a stranger sends leads anywhere: every field that names a file, found by reflection, refuses them."""

import json
import typing
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from tuf.api.metadata import TargetFile, Targets

import ddm.transport.shards
import ddm.trust.ceremony
import ddm.trust.log.checkpoint_store
import ddm.trust.version_store  # noqa: F401
from ddm.errors import ArchipelagoError, DocumentError, TrustError
from ddm.io.paths import check_path
from ddm.protocol.base import Model
from ddm.trust.metadata import METADATA_LIFE, expiry, sign_metadata
from ddm.trust.silo_role import verify_silo_metadata
from tests.support.case import case
from tests.support.mutations import json_paths, replace_at, value_at
from tests.support.parsers import DIGEST, KEY, NOW, PLAN, document_parsers, message_parsers

HOSTILE = {
    "parent": "../x",
    "parent alone": "..",
    "this folder": ".",
    "parent inside": "a/../../b",
    "parent at the end": "a/..",
    "absolute": "/etc/passwd",
    "two slashes": "//server/share",
    "slash twice": "a//b",
    "slash at the end": "a/",
    "slash alone": "/",
    "nothing": "",
    "backslash": "a\\b",
    "parent by backslash": "..\\x",
    "drive": "C:\\x",
    "drive without a slash": "C:x",
    "stream of a file": "a:b",
    "device of Windows": "\\\\.\\PhysicalDrive0",
    "nul inside": "a\0b",
    "nul at the end": "a.json\0",
    "line break": "a\n",
    "line break before": "\na",
    "escape": "a\x1b[2J",
    "percent": "%2e%2e/x",
    "percent twice": "%252e%252e%252fx",
    "overlong percent": "..%c0%afx",
    "wide dots": "\uff0e\uff0e/x",
    "wide slash": "a\uff0fb",
    "division slash": "a\u2215b",
    "two-dot leader": "\u2025/x",
    "Cyrillic a": "\u0430dmin",
    "combining accent": "e\u0301",
    "written from the right": "a\u202egpj.exe",
    "no width": "a\u200bb",
    "Arabic digit": "\u0661",
    "home": "~/x",
    "variable": "$HOME/x",
    "hidden": ".git",
    "hidden inside": "a/.git/config",
    "blank before": " a",
    "blank after": "a ",
    "blank inside": "a b",
    "pattern": "a*",
    "question mark": "a?",
    "address": "file:///etc/passwd",
    "long part": "a" * 129,
    "long": "/".join(["a" * 100] * 8),
    "deep": "/".join("a" * 9),
    "longest": "a/" * 50_000 + "a",
}
# One of these is what an honest sender writes, whatever the field.
HONEST = [
    PLAN,
    "north",
    "north-1",
    "plan/a.safetensors",
    DIGEST,
    f"ed25519:{DIGEST}",
    "0" * 128,
    "targets.json",
]
HONEST += (
    "1.0.31",
    "2030-01-01T00:00:00Z",
    "127.0.0.1:9092",
    "ecdsa-sha2-nistp256 AAAA",
    "receipt",
    "vit_small",
)
HONEST += ("<f4", "a1")  # a type of numbers, and the name of a start
HONEST += (
    '{"format":"archipelago/envelope/1","key":""}',
    "A" * 43 + "=",
    "log+01234567+" + "A" * 44,
)
# What no program opens, joins to a folder, or names a file after. Whoever adds a field here says so.
FREE_TEXT = {
    *(
        "Waiver.role",
        "Waiver.reason",
        "Responsible.role",
        "Responsible.reason",
        "Submission.software",
        "Island.software",
        "Manifest.licence",
        "Plan.licence",
        "Base.licence",
        "Base.changes",
        "Base.source",
        "Invitation.licence",
        "PolicyLimits.licences",
        "Manifest.cite",
    ),
    *(
        "PublishedFigure.metric",
        "RouterReport.reason",
        "RefusedVerdict.reason",
        "WithdrawnVerdict.reason",
        "SigningRequest.purpose",
    ),
    *(
        "FederationOpened.federation",
        "Invitation.federation",
        "Invitation.ca_certificate",
        "Invitation.root",
    ),
    *(
        "SigningRequest.payload",
        "SigningRequest.before",
        "SigningRequest.root",
        "_Envelope.payload",
    ),
    # `ddm.trust.paths` judges these after the signature: see the tests of listed paths below.
    *("_Targets.targets", "_DelegatedRole.paths"),
    *(
        "_VersionRecord.roles",
        "RemovedRoles.roles",
        "RemovedRoles.left",
        "LogRecord.checkpoint",
    ),  # this computer's own memory
    "PublishedSilo.units_reason",  # printed and escaped
    "ClassCondition.names",  # printable; compared with labels of tables, and written into files of samples
    "PartialAdaptation.trained",  # beginnings of weights' names, compared with those of the expert
    # Leads anywhere on purpose: images lie where they lie. Who writes a job's folder may have read what it may read.
    "ArrayLocation.path",
    "Launch.host",  # compared with this machine's name
    # printed and escaped
    *(
        "ProcessFailure.subject",
        "ProcessFailure.expected",
        "ProcessFailure.got",
        "ProcessFailure.remedy",
    ),
}
INSIDE = (
    "ddm.protocol.",
    "ddm.transport.messages",
    "ddm.trust.",
    "ddm.transport.shards",
    "ddm.training.job",
)


def models(kind: type[Model] = Model) -> Iterator[type[Model]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith(INSIDE):
            yield child
        yield from models(child)


def texts(annotation: Any) -> Iterator[Any]:
    """Every kind of text inside an annotation."""
    if annotation is str:
        yield str
    elif typing.get_origin(annotation) is Annotated and typing.get_args(annotation)[0] is str:
        yield annotation
    elif typing.get_origin(annotation) is not typing.Literal:
        for part in typing.get_args(annotation):
            yield from texts(part)


def text_fields() -> dict[str, list[Any]]:
    kinds_by_field: dict[str, list[Any]] = {}
    for model in models():
        for name, field in model.model_fields.items():
            assert isinstance(field, FieldInfo)
            if kinds := list(texts(field.rebuild_annotation())):
                kinds_by_field[f"{model.__name__}.{name}"] = kinds
    return kinds_by_field


def accepts(kind: Any, name: str) -> bool:
    try:
        TypeAdapter(kind).validate_python(name, strict=True)
    except ValidationError:
        return False
    return True


FIELDS = text_fields()
# By the name of a field of free text: all fields of each model that has it.
FREE = {
    name: [
        {field.alias or key for key, field in model.model_fields.items()}
        for model in models()
        if f"{model.__name__}.{name}" in FREE_TEXT
    ]
    for name in {field.rpartition(".")[2] for field in FREE_TEXT}
}


def test_reflection_finds_the_fields_that_name_files() -> None:
    known = {
        "File.path",
        "Span.path",
        "IndexEntry.path",
        "Offer.plan_id",
        "Submission.silo_id",
        "Manifest.plan_id",
    }
    known |= {
        "SubmittedExpert.expert_id",
        "PcaEncoderSpec.path",
        "Clustering.path",
        "SketchSpec.path",
        "_Progress.ranges",
    }
    assert known | FREE_TEXT <= set(FIELDS)


def test_field_takes_honest_text_and_no_name_that_leads_elsewhere() -> None:
    for field in sorted(set(FIELDS) - FREE_TEXT):
        with case(field=field):
            for kind in FIELDS[field]:
                assert any(accepts(kind, name) for name in HONEST)
                assert not [why for why, name in HOSTILE.items() if accepts(kind, name)]


def is_free(value: Any, place: tuple[Any, ...]) -> bool:
    """Whether a place lies in a field of free text, of a model that could have been written as what holds it."""
    for depth, name in enumerate(place):
        holder = value_at(value, place[:depth])
        if isinstance(holder, dict) and any(kind >= set(holder) for kind in FREE.get(name, [])):
            return True
    return False


def test_document_is_refused_with_a_name_that_leads_elsewhere_in_any_of_its_fields() -> None:
    for name in {**document_parsers(), **message_parsers()}:
        with case(name=name):
            door = {**document_parsers(), **message_parsers()}[name]
            value = json.loads(door.sample)
            for place in json_paths(value):
                if isinstance(value_at(value, place), str) and not is_free(value, place):
                    for hostile in HOSTILE.values():
                        spoiled = json.dumps(
                            replace_at(value, place, hostile), sort_keys=True, separators=(",", ":")
                        ).encode()
                        with pytest.raises(door.refusals):
                            door.parse(spoiled)


def listing(path: str) -> bytes:
    """What a silo signs when it lists one file more."""
    paths = {f"{PLAN}/silos/north/submission.json", path}
    files = {path: TargetFile(1, {"sha256": DIGEST}, path) for path in paths}
    fields = {"root_digest": DIGEST}
    signed = Targets(1, None, expiry(NOW, METADATA_LIFE), files, unrecognized_fields=fields)
    return sign_metadata(signed, [KEY])


def read_listing(data: bytes) -> Any:
    return verify_silo_metadata(
        data, root_digest=DIGEST, plan_id=PLAN, silo_id="north", key=KEY.public, now=NOW
    )


def test_silo_cannot_sign_a_name_that_leads_elsewhere() -> None:
    for prefix, why in product(["", f"{PLAN}/silos/north/"], HOSTILE):
        with case(prefix=prefix, why=why):
            path = f"{PLAN}/silos/north/experts/north/expert.safetensors"
            assert path in read_listing(listing(path))
            try:
                data = listing(prefix + HOSTILE[why])
            except DocumentError:
                continue  # too long or empty for the metadata's own schema
            with pytest.raises(TrustError) as refusal:
                read_listing(data)
            assert str(refusal.value).isprintable() and len(str(refusal.value)) < 1000


def test_listed_path_is_refused_when_it_leads_elsewhere() -> None:
    for why in HOSTILE:
        with case(why=why):
            check_path(f"{PLAN}/plan/a.safetensors", "listing")
            with pytest.raises(ArchipelagoError):
                check_path(HOSTILE[why], "listing")
