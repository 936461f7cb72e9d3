"""Files that an operator names, and that others may have made: archives of images and configurations."""

import io
import struct
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from aggregator.config import FederationSettings
from aggregator.planning.recipe import Recipe
from ddm.errors import DataError, FormatError, SetupError
from ddm.images.array_files import read_images
from ddm.images.npz import read_array
from ddm.io.settings import MAX_SETTINGS_BYTES, load_settings
from ddm.protocol.data import DataSpec
from silo.config import Policy, SiloSettings
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.federation import recipe
from tests.support.mutations import scrambled_bytes

SPEC = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
MANY = 1 << 20
quick = settings(max_examples=30, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=5000, suppress_health_check=list(HealthCheck))


def npz(
    images: object = None, *, method: int = zipfile.ZIP_DEFLATED, name: str = "images.npy"
) -> bytes:
    """An archive; `images` may be bytes that are no array at all."""
    made = io.BytesIO()
    if not isinstance(images, bytes):
        np.lib.format.write_array(
            made, np.zeros((3, 1, 4, 4), np.float32) if images is None else images
        )
    data = images if isinstance(images, bytes) else made.getvalue()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", method) as packed:
        packed.writestr(name, data)
    return archive.getvalue()


def array_header(text: str) -> bytes:
    """The beginning of an array file that says of itself what it likes."""
    padded = text.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded


def header(shape: object, dtype: str = "<f4") -> bytes:
    return array_header(f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}")


def patched(data: bytes, offset: int, new: bytes) -> bytes:
    """Change the same field in the entry before the data and in the directory behind them."""
    local = data.index(b"PK\x03\x04")
    central = data.index(b"PK\x01\x02")
    changed = bytearray(data)
    changed[local + offset : local + offset + len(new)] = new
    changed[central + offset + 2 : central + offset + 2 + len(new)] = new
    return bytes(changed)


HOSTILE = {
    "nothing": b"",
    "no archive": b"PK\x05\x06" + b"\0" * 18,
    "an array, no archive": header((3, 1, 4, 4)) + b"\0" * 192,
    "no images": npz(name="others.npy"),
    "images that are text": npz(b"text"),
    "images outside": npz(name="../images.npy"),
    "pickled objects": npz(np.array([object()] * 3)),
    "encrypted": patched(npz(), 6, b"\x01\x00"),
    "unknown compression": patched(npz(), 8, b"\x63\x00"),
    "damaged bzip2": patched(npz(b"x" * 99), 8, b"\x0c\x00"),
    "damaged lzma": patched(
        npz(b"\x05\x00\x05\x00" + b"x" * 99, method=zipfile.ZIP_STORED), 8, b"\x0e\x00"
    ),
    "more than there is": npz(header((2**40, 1, 4, 4))),
    "more than can be": npz(header((2**62, 1, 4, 4))),
    "negative": npz(header((-1, 1, 4, 4)) + b"\0" * 64),
    "very many of nothing": npz(header((2**62,), "|V0")),
    "shape that is no tuple": npz(header("4")),
    "code for a header": npz(array_header("__import__('os').system('true')")),
    "header nested deeply": npz(array_header("(" * 5000 + ")" * 5000)),
    "header of the last version": npz(b"\x93NUMPY\x09\x00" + b"\0" * 200),
    "header that is cut off": npz(header((3, 1, 4, 4))[:-20]),
    "data cut off": npz(header((3, 1, 4, 4)) + b"\0" * 191),
    "numbers too large": npz(np.full((3, 1, 4, 4), 1e300)),
    "complex numbers": npz(np.zeros((3, 1, 4, 4), np.complex64)),
    "dates": npz(np.zeros((3, 1, 4, 4), "M8[s]")),
    "records": npz(np.zeros((3, 1, 4, 4), [("a", "f4")])),
}


def read(path: Path, data: bytes) -> torch.Tensor:
    path.write_bytes(data)
    return read_images(path, SPEC)


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_honest_archive_is_read(tmp_path: Path, method: int) -> None:
    assert read(tmp_path / "a.npz", npz(method=method)).shape == (3, 1, 4, 4)


def test_archive_is_refused(tmp_path: Path) -> None:
    for why in HOSTILE:
        with case(why=why), pytest.raises(DataError):
            read(tmp_path / "a.npz", HOSTILE[why])


def try_archive(path: Path, data: bytes) -> None:
    try:
        images = read(path, data)
    except DataError:
        return
    assert images.shape[1:] == SPEC.shape and images.isfinite().all()


@given(data=scrambled_bytes(npz()) | scrambled_bytes(npz(method=zipfile.ZIP_STORED)))
@quick
def test_any_archive_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    try_archive(tmp_path / "a.npz", data)


@pytest.mark.slow
@given(
    data=scrambled_bytes(npz())
    | scrambled_bytes(npz(method=zipfile.ZIP_STORED))
    | scrambled_bytes(npz(method=zipfile.ZIP_LZMA))
)
@thorough
def test_any_archive_is_read_or_refused_however_long_one_tries(tmp_path: Path, data: bytes) -> None:
    try_archive(tmp_path / "a.npz", data)


@pytest.mark.measured
def test_archive_that_unpacks_to_far_more_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    num = (64 << 20) // 64
    bomb = tmp_path / "bomb.npz"
    bomb.write_bytes(npz(np.zeros((num, 1, 4, 4), np.float32)))
    assert bomb.stat().st_size < MANY
    assert len(read_array(bomb, "images", max_bytes=65 << 20)) == num
    outcome = attempt(lambda: read_array(bomb, "images", max_bytes=MANY), mib=16, cpu_s=1)
    assert outcome.error == "DataError" and "at most" in outcome.message
    assert outcome.mib <= 16 and outcome.cpu_s <= 1, outcome


@pytest.mark.measured
def test_archive_that_lies_about_its_size_is_read_no_further_than_it_says(tmp_path: Path) -> None:
    lying = tmp_path / "lying.npz"
    lying.write_bytes(
        patched(npz(np.zeros((1 << 20, 1, 4, 4), np.float32)), 22, struct.pack("<I", 4096))
    )
    outcome = attempt(lambda: read_array(lying, "images", max_bytes=MANY), mib=80, cpu_s=1)
    assert outcome.error == "DataError"
    # The array's own header says 64 MiB, which the system reserves and nobody touches.
    assert outcome.mib <= 16 and outcome.cpu_s <= 1, outcome


@pytest.mark.measured
def test_images_that_no_memory_holds_are_refused_by_their_header(tmp_path: Path) -> None:
    lying = tmp_path / "lying.npz"
    lying.write_bytes(patched(npz(header((2**26, 1, 4, 4))), 22, struct.pack("<I", 2**32 - 2)))
    outcome = attempt(lambda: read_images(lying, SPEC), mib=64, cpu_s=2)
    assert outcome.error == "DataError" and outcome.mib <= 64, outcome


CONFIGURATIONS: dict[str, tuple[type[BaseModel], dict[str, object]]] = {
    "silo.toml": (
        SiloSettings,
        {
            "silo_id": "north",
            "data": "a.npz",
            "federation": "tiny",
            "address": "a:1",
            "root_digest": "c" * 64,
        },
    ),
    "policy.toml": (Policy, Policy().model_dump(mode="json", exclude_none=True)),
    "federation.toml": (
        FederationSettings,
        {"name": "tiny", "host": "127.0.0.1", "port": 9092, "licence": "CC0-1.0"},
    ),
    "recipe.toml": (Recipe, recipe().model_dump(mode="json", exclude_none=True)),
}
ODD_TOML = {
    "number of many digits": b"a = 1" + b"0" * 5000,
    "arrays nested deeply": b"a = " + b"[" * 5000,
    "tables nested deeply": b"a = " + b"{a=" * 5000,
    "many dots": b"a" + b".a" * 4000 + b" = 1",
    "time": b"a = 2026-11-21T00:00:00Z",
    "not a number": b"a = nan",
    "infinite": b"threads = inf",
    "name twice": b"a = 1\na = 1",
    "other bytes": b"a = '\xff'",
    "control character": b"a = '\x00'",
    "mark of byte order": b"\xef\xbb\xbfa = 1",
    "half a character": b'a = "\\ud800"',
    "string that never ends": b'a = """' + b"a" * 1000,
}


def load(name: str, data: bytes, folder: Path) -> BaseModel:
    (folder / name).write_bytes(data)
    return load_settings(CONFIGURATIONS[name][0], folder / name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_honest_configuration_is_read(tmp_path: Path, name: str) -> None:
    load(name, tomli_w.dumps(CONFIGURATIONS[name][1]).encode(), tmp_path)


@pytest.mark.measured
def test_odd_configuration_is_refused_in_bounded_time(tmp_path: Path) -> None:
    for why in ODD_TOML:
        with case(why=why):
            outcome = attempt(partial(load, "silo.toml", ODD_TOML[why], tmp_path), mib=512, cpu_s=5)
            assert outcome.error == "SetupError", outcome
            assert outcome.cpu_s <= 5 and outcome.mib <= 512, outcome


def test_configuration_above_its_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        load("policy.toml", b"#" * (MAX_SETTINGS_BYTES + 1), tmp_path)
    assert load("policy.toml", b"#" * MAX_SETTINGS_BYTES, tmp_path) == Policy()


@pytest.mark.parametrize("name", CONFIGURATIONS)
@given(data=st.data())
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_any_configuration_is_read_or_refused(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    sample = tomli_w.dumps(CONFIGURATIONS[name][1]).encode()
    spoiled = data.draw(scrambled_bytes(sample))
    try:
        load(name, spoiled, tmp_path)
    except (SetupError, FormatError):
        return
    # Read with or without a byte order mark, as editors on Windows write it.
    tomllib.loads(spoiled.decode("utf-8-sig"))
