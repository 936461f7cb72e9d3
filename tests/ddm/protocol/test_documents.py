"""Documents: what parses, what is refused, and that encoding is canonical."""

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm.errors import DocumentError
from ddm.protocol.base import (
    MAX_DEPTH,
    MAX_INTEGER,
    Document,
    check_json,
    sha256_file,
    sha256_hex,
)
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Receipt
from ddm.protocol.submission import Submission
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject


def test_plan_survives_encoding_and_its_digest_is_of_the_bytes() -> None:
    plan = Plan.parse(to_bytes(plan_document()), subject="plan")
    assert Plan.parse(plan.encode(), subject="plan") == plan
    assert plan.digest == sha256_hex(plan.encode())
    assert json.loads(plan.encode())["plan_id"] == plan.plan_id


def test_router_cannot_draw_without_a_condition_from_experts_that_always_had_one() -> None:
    router = {"kind": "samples", "patch": 2, "hidden": 16, "depth": 1, "heads": 2, "num_steps": 9}
    condition = {"kind": "class", "num_classes": 2, "drop": 0.0}
    document = plan_document(router=router, condition=condition)
    with pytest.raises(DocumentError, match="condition.drop must be above 0"):
        Plan.parse(to_bytes(document), subject="plan")
    # Of public images nothing is drawn; a router that reads the class draws under classes.
    for change in ({"labels": "group"}, {"conditional": True}):
        Plan.parse(to_bytes(document | {"router": router | change}), subject="plan")
    Plan.parse(to_bytes(document | {"condition": condition | {"drop": 0.1}}), subject="plan")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": NaN}',
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    ],
    ids=["empty", "list", "null", "not utf-8", "nan", "name twice", "deep", "deep objects"],
)
def test_document_refuses_what_is_no_document(data: bytes) -> None:
    for kind in (Plan, Submission, Manifest, Receipt):
        with pytest.raises(DocumentError):
            kind.parse(data, subject="document")


def test_document_refuses_more_bytes_than_its_limit() -> None:
    data = to_bytes(plan_document())
    with pytest.raises(DocumentError, check=has_subject("plan")):
        Plan.parse(data, subject="plan", limit=len(data) - 1)


def test_digits_that_canonical_json_cannot_write_are_refused() -> None:
    largest = check_json(str(MAX_INTEGER).encode(), subject="number", limit=100)
    assert largest == 2**53 - 1
    # The nearest doubles of these have other digits.
    for digits in (str(2**53 + 1), str(-(2**53) - 1), "1" * 51, "9" * 99):
        with case(digits=digits), pytest.raises(DocumentError):
            check_json(digits.encode(), subject="number", limit=100)


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    assert check_json(json.dumps({"a": '["' * 100}).encode(), subject="x", limit=10_000) == {
        "a": '["' * 100
    }


def test_closing_brackets_inside_strings_do_not_hide_nesting() -> None:
    bomb = b'["]]]]]]]]]]",' * (MAX_DEPTH + 1) + b"1" + b"]" * (MAX_DEPTH + 1)
    with pytest.raises(DocumentError, match="nesting"):
        check_json(bomb, subject="x", limit=10_000)


@given(st.binary(max_size=400))
def test_document_parsers_raise_nothing_but_their_error(data: bytes) -> None:
    for kind in (Plan, Submission, Manifest, Receipt):
        with pytest.raises(DocumentError):
            kind.parse(data, subject="document")


def test_file_refuses_a_path_that_leads_elsewhere() -> None:
    for path in [
        "../x",
        "/etc/passwd",
        "a/../b",
        ".hidden",
        "a//b",
        "a/",
        "a\\b",
        "a/" * 9 + "b",
        "",
    ]:
        with case(path=path):
            document = plan_document()
            document["files"][0]["path"] = path
            with pytest.raises(DocumentError, check=has_subject("plan, field files.0.path")):
                Plan.parse(to_bytes(document), subject="plan")


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_file(tmp_path / "f") == sha256_hex(b"abc")


class Cost(Document):
    """A document with a number of operations and a whole number without bounds of its own."""

    format: Literal["archipelago/cost/1"] = "archipelago/cost/1"
    flops: float
    steps: int


@pytest.mark.parametrize(
    ("flops", "written"),
    [
        (9007199254740994.0, b"9007199254740994"),
        (1.01010101e17, b"101010101000000000"),
        (1e20, b"100000000000000000000"),
        (1e21, b"1e+21"),
        (0.1, b"0.1"),
    ],
)
def test_document_of_a_large_training_is_read_as_it_was_written(
    flops: float, written: bytes
) -> None:
    """RFC 8785 writes a float of up to 21 digits without a point; a training of hours takes more than 2**53."""
    document = Cost(flops=flops, steps=3)
    data = document.encode()
    assert b'"flops":' + written in data
    assert Cost.parse(data, subject="cost") == document
    assert check_json(data, subject="cost", limit=1000)["flops"] == flops


@pytest.mark.parametrize(
    "data",
    [
        b'{"flops": 1.0, "format": "archipelago/cost/1", "steps": 9007199254740992}',
        b'{"flops": 9007199254740993, "format": "archipelago/cost/1", "steps": 1}',
        b'{"flops": 1e999, "format": "archipelago/cost/1", "steps": 1}',
        b'{"flops": 1' + b"0" * 40 + b', "format": "archipelago/cost/1", "steps": 1}',
    ],
    ids=["a whole number", "digits of no float", "infinity", "more digits than are written"],
)
def test_number_that_two_programs_may_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError):
        Cost.parse(data, subject="cost")
