"""The largest and worst bytes that a parser takes cost it seconds and a part of a gibibyte, whatever they say."""

import json
import mmap
import os
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tuf.api.metadata import Targets

from aggregator.config import Federation
from aggregator.membership.registry import enroll_silo
from ddm.errors import ArchipelagoError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import read_bounded
from ddm.io.settings import load_settings
from ddm.io.tensors import read_header
from ddm.io.untrusted import read_small
from ddm.protocol.base import MAX_DOCUMENT_BYTES, MAX_VALUES, check_json
from ddm.protocol.manifest import Manifest
from ddm.trust.metadata import LIMITS, parse_metadata
from ddm.trust.verify import verify_release
from silo.config import SiloSettings
from silo.setup import read_invitation
from tests.support.bounded import Outcome, attempt
from tests.support.case import case
from tests.support.parsers import DIGEST, ParserCase, document_parsers, message_parsers, metadata

pytestmark = pytest.mark.measured

# What one document may cost at worst, on top of the program itself.
MIB = 400
CPU_S = 5
TEN_GIB = 10 * 1024**3


def filled(start: bytes, one: bytes, end: bytes, limit: int) -> bytes:
    """As many of `one` as fit."""
    return start + one * ((limit - len(start) - len(end)) // len(one)) + end


def bombs(limit: int) -> dict[str, bytes]:
    """Texts of `limit` bytes that cost a naive parser the most."""
    return {
        "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
        "100,000 levels of objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "levels as many as fit": b"[" * limit,
        "string that never ends": filled(b'["', b"a", b"", limit),
        "escapes that never end": filled(b'"', b'\\"', b"", limit),
        "backslashes": filled(b'"', b"\\", b"", limit),
        "quotes": filled(b"[", b'""', b"]", limit),
        "empty lists": filled(b"[", b"[],", b"0]", limit),
        "empty objects": filled(b"[", b"{},", b"0]", limit),
        "numbers": filled(b"[", b"0,", b"0]", limit),
        "digits": filled(b"", b"9", b"", limit),
        "digits behind a point": filled(b"0.", b"0", b"1", limit),
        "exponent": filled(b"1e", b"9", b"", limit),
        # No document is a list; some need no field, so that an empty object would be one.
        "blanks": filled(b"", b" ", b"[]", limit),
        "the same name": filled(b"{", b'"a":0,', b'"a":0}', limit),
        "many names": b"{" + b",".join(b'"%d":0' % number for number in range(limit // 12)) + b"}",
        "long name": filled(b'{"', b"a", b'":0}', limit),
        "brackets that close nothing": filled(b"", b"][", b"", limit),
    }


def misfits(sample: bytes, limit: int) -> dict[str, bytes]:
    """The honest document with one list or table in it that has as many wrong entries as are allowed."""
    value = json.loads(sample)
    documents = {}
    text = json.dumps(value, separators=(",", ":"))
    for name, part in value.items():
        if isinstance(part, list | dict):
            old = f'"{name}":' + json.dumps(part, separators=(",", ":"))
            for kind, one in (("objects", "{},"), ("numbers", "0,")):
                many = "[" + one * min(MAX_VALUES - 2000, (limit - len(text)) // len(one)) + "0]"
                documents[f"{name} of {kind}"] = text.replace(old, f'"{name}":{many}').encode()
            names = ",".join(
                f'"{number}":0' for number in range(min(MAX_VALUES - 2000, limit // 12))
            )
            documents[f"{name} of names"] = text.replace(old, f'"{name}":{{{names}}}').encode()
    return documents


def refused(outcome: Outcome, name: str = "") -> None:
    assert outcome.error and outcome.error.endswith("Error") and outcome.error != "MemoryError", (
        name,
        outcome,
    )
    assert outcome.cpu_s <= CPU_S and outcome.mib <= MIB, (name, outcome)


def all_refused(door: ParserCase, attacks: dict[str, bytes]) -> None:
    def attack(data: bytes) -> Callable[[], object]:
        def run() -> object:
            try:
                return door.parse(data)
            except door.refusals as error:
                raise ArchipelagoError("refused") from error

        return run

    for name, data in attacks.items():
        outcome = attempt(attack(data), mib=MIB, cpu_s=CPU_S)
        assert outcome.error == "ArchipelagoError", (name, outcome)
        refused(outcome, name)


def test_bombs_of_json_are_refused_in_bounded_time_and_memory() -> None:
    door = ParserCase(b"", lambda data: Manifest.parse(data, subject="manifest"))
    all_refused(door, bombs(MAX_DOCUMENT_BYTES))


@pytest.mark.parametrize("name", ["submission", "report"])
def test_document_of_nothing_but_misfits_is_refused_in_bounded_time_and_memory(name: str) -> None:
    door = {**document_parsers(), **message_parsers()}[name]
    worst = {
        what: data
        for what, data in misfits(door.sample, door.limit).items()
        if what.startswith(("exp", "files"))
    }
    all_refused(door, worst)


@pytest.mark.slow
@pytest.mark.parametrize("name", {**document_parsers(), **message_parsers()})
def test_every_parser_refuses_every_bomb_in_bounded_time_and_memory(name: str) -> None:
    door = {**document_parsers(), **message_parsers()}[name]
    all_refused(door, bombs(door.limit) | misfits(door.sample, door.limit))


def test_measurement_sees_what_is_spent() -> None:
    """The control: without its bounds, a parser fails here."""
    spent = attempt(lambda: bytearray(64 * 1024**2).count(1), mib=MIB, cpu_s=CPU_S)
    assert spent.error is None and spent.mib > 60
    assert (
        attempt(lambda: bytearray(8 * MIB * 1024**2), mib=MIB, cpu_s=CPU_S).error == "MemoryError"
    )
    assert attempt(lambda: [None for _ in iter(int, 1)], mib=10**6, cpu_s=0).error in (
        "Killed",
        "MemoryError",
    )


def test_measurement_sees_memory_that_the_process_had_freed() -> None:
    """A heap with a hole of 95 MiB, which a block behind it keeps from shrinking: its pages are still resident."""
    freed = [bytearray(100_000) for _ in range(1000)]
    behind = bytearray(100_000)
    del freed
    assert attempt(lambda: bytearray(64 * 1024**2).count(1), mib=MIB, cpu_s=CPU_S).mib > 60
    del behind


def test_measurement_sees_memory_that_was_freed_before_files_were_mapped(tmp_path: Path) -> None:
    """Pages of files, which do not count, must not hide a peak that came before them."""
    (tmp_path / "file").write_bytes(bytes(96 * 1024**2))
    mapped = []

    def attack() -> None:
        block = bytearray(80 * 1024**2)
        block.count(1)
        time.sleep(0.2)  # the peak lasts, so that it is seen on a busy machine too
        del block
        with (tmp_path / "file").open("rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        assert mapped[0].find(b"1") < 0

    spent = attempt(attack, mib=MIB, cpu_s=CPU_S)
    assert spent.error is None and spent.mib > 60


def test_honest_json_as_large_as_documents_may_be_is_read() -> None:
    data = json.dumps({"experts": ["a" * 58] * (MAX_VALUES - 1)}).encode()
    assert len(data) > MAX_DOCUMENT_BYTES * 0.9
    outcome = attempt(
        lambda: check_json(data, subject="x", limit=MAX_DOCUMENT_BYTES), mib=MIB, cpu_s=CPU_S
    )
    assert outcome.error is None and outcome.cpu_s < CPU_S, outcome


SIGNATURE = {"keyid": DIGEST, "sig": "0" * 128}
KEY = {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": DIGEST}}


def crowded(what: str, number: int) -> bytes:
    """Metadata of `targets` with very many of one thing."""
    value = json.loads(metadata()["targets"])
    if what == "signatures":
        value["signatures"] = [SIGNATURE | {"keyid": f"{index:064x}"} for index in range(number)]
    elif what == "keys":
        value["signed"]["delegations"]["keys"] = {f"{index:064x}": KEY for index in range(number)}
    elif what == "roles":
        one_role = value["signed"]["delegations"]["roles"][:1]
        value["signed"]["delegations"]["roles"] = one_role * number
    else:
        value["signed"]["targets"] = {
            f"{index:x}": {"hashes": {"sha256": DIGEST}, "length": 1} for index in range(number)
        }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def test_metadata_with_very_many_of_one_thing_is_refused_in_bounded_time_and_memory() -> None:
    for what, number in [
        ("signatures", 100_000),
        ("signatures", 15_000),
        ("keys", 15_000),
        ("roles", 15_000),
        ("targets", 15_000),
    ]:
        with case(what=what, number=number):
            data = crowded(what, number)
            assert (len(data) > LIMITS["targets"]) is (number == 100_000)
            outcome = attempt(
                partial(parse_metadata, data, Targets, "targets.json"), mib=MIB, cpu_s=CPU_S
            )
            assert outcome.error == "DocumentError"
            refused(outcome)


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten gibibytes that begin as an honest file does."""
    path = tmp_path_factory.mktemp("huge") / "a.json"
    path.write_bytes(b'{"format": "')
    os.truncate(path, TEN_GIB)
    return path


READERS: dict[str, Callable[[Path], object]] = {
    "document": lambda path: read_bounded(path, MAX_DOCUMENT_BYTES),
    "metadata": lambda path: read_small(path.parent, path.name, LIMITS["root"]),
    "invitation": lambda path: read_invitation(path, DIGEST),
    "card": lambda path: enroll_silo(Federation(path.parent), path),
    "configuration": lambda path: load_settings(SiloSettings, path),
    "tensors": lambda path: read_header(path, max_bytes=TEN_GIB),
    "tensors above their limit": lambda path: read_header(path, max_bytes=1 << 20),
    "incoming folder": lambda path: copy_tree_bounded(
        path.parent, path.parent.with_name("copy"), max_bytes=1 << 20
    ),
}


def test_file_of_ten_gibibytes_is_refused_before_it_is_read(huge: Path) -> None:
    for reader in READERS:
        with case(reader=reader):
            outcome = attempt(partial(READERS[reader], huge), mib=32, cpu_s=1)
            refused(outcome)
            assert outcome.mib <= 32 and outcome.cpu_s <= 1, outcome


def test_release_with_metadata_of_ten_gibibytes_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "release" / "metadata").mkdir(parents=True)
    for name in ("1.root.json", "targets.json"):
        (tmp_path / "release" / "metadata" / name).touch()
        os.truncate(tmp_path / "release" / "metadata" / name, TEN_GIB)
    outcome = attempt(
        lambda: verify_release(tmp_path / "release", b"", state=None), mib=32, cpu_s=1
    )
    refused(outcome)
    assert outcome.mib <= 32 and outcome.cpu_s <= 1, outcome


def tensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


EMPTY = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
SCALAR = b'"%d":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}'
TENSOR_BOMBS = {
    "header of 8 EiB": struct.pack("<Q", 2**63) + b"{}",
    "header of 16 EiB": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header of 1 MiB and a byte": tensors(b"{" + b" " * (1 << 20) + b"}"),
    "a million empty tensors": tensors(b"{" + b",".join(EMPTY % n for n in range(10**6)) + b"}"),
    "empty tensors as many as fit": tensors(
        b"{" + b",".join(EMPTY % n for n in range(18_000)) + b"}"
    ),
    "tensors of a byte as many as fit": tensors(
        b"{" + b",".join(SCALAR % (n, n, n + 1) for n in range(15_000)) + b"}", b"\0" * 14_999
    ),
    "names of one letter": tensors(b"{" + b",".join(b'"a":0' for _ in range(170_000)) + b"}"),
    "metadata of a mebibyte": tensors(b'{"__metadata__":{"a":"' + b"b" * 1_000_000 + b'"}}'),
    "metadata of many names": tensors(
        b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(90_000)) + b"}}"
    ),
    "quotes that never end": tensors(b'{"' + b'\\"' * 500_000),
    "dimensions that multiply beyond everything": tensors(
        b'{"a":{"dtype":"F64","shape":['
        + b",".join([b"1099511627776"] * 16)
        + b'],"data_offsets":[0,8]}}',
        b"\0" * 8,
    ),
}


@pytest.mark.parametrize("bomb", TENSOR_BOMBS)
def test_tensor_file_is_refused_by_its_header_in_bounded_time_and_memory(
    tmp_path: Path, bomb: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(TENSOR_BOMBS[bomb])
    outcome = attempt(lambda: read_header(path, max_bytes=1 << 40), mib=MIB, cpu_s=CPU_S)
    assert outcome.error == "TensorFileError"
    refused(outcome)


def test_tensor_file_of_thousands_of_small_tensors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        tensors(b"{" + b",".join(SCALAR % (n, n, n + 1) for n in range(5000)) + b"}", b"\0" * 5000)
    )
    assert len(read_header(path, max_bytes=1 << 20)) == 5000
