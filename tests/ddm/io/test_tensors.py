"""Attacks on a safetensors file, and the oracle that an honest one is read and written as the library does."""

import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as reference_load
from safetensors.torch import save as reference_save

from ddm.errors import DigestError, TensorFileError
from ddm.io.tensors import (
    TensorSpec,
    check_file,
    check_tensors,
    load_tensors,
    read_header,
    save_tensors,
    spec_of,
)
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.errors import has_subject

MANY = 10**6


def tensors() -> dict[str, torch.Tensor]:
    return {
        "blocks.0.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "half": torch.ones(3, dtype=torch.float16),
        "count": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "double": torch.ones(1, 1, dtype=torch.float64),
    }


def raw(header, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple = (1,)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def refused(path, data: bytes, **kwargs) -> TensorFileError:
    path.write_bytes(data)
    with pytest.raises(TensorFileError) as error:
        load_tensors(
            path, kwargs.pop("expected", None), max_bytes=kwargs.pop("max_bytes", MANY), **kwargs
        )
    assert error.value.subject.startswith("x.safetensors")
    return error.value


def test_file_round_trips_every_dtype(path):
    save_tensors(path, tensors(), {"format": "pt"})
    loaded = load_tensors(
        path, {name: spec_of(tensor) for name, tensor in tensors().items()}, max_bytes=MANY
    )
    assert set(loaded) == set(tensors())
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_file_is_byte_for_byte_what_the_library_writes(path):
    save_tensors(path, tensors())
    assert path.read_bytes() == reference_save(tensors())


def test_library_reads_a_file_with_several_metadata_entries(path):
    save_tensors(path, tensors(), {"b": "2", "a": "1"})
    loaded = reference_load(path.read_bytes())
    assert torch.equal(loaded["half"], tensors()["half"])


def test_same_tensors_give_the_same_bytes_in_any_order_of_names_and_strides(path, tmp_path):
    save_tensors(path, tensors(), {"b": "2", "a": "1", "c": "3"})
    turned = {
        name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor
        for name, tensor in tensors().items()
    }
    assert not turned["blocks.0.weight"].is_contiguous()
    save_tensors(tmp_path / "again", dict(reversed(turned.items())), {"c": "3", "a": "1", "b": "2"})
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_shared_memory_is_written_as_separate_tensors(path):
    both = torch.arange(4.0)
    save_tensors(path, {"a": both, "b": both[1:3]})
    loaded = load_tensors(path, None, max_bytes=MANY)
    assert torch.equal(loaded["b"], torch.tensor([1.0, 2.0]))


def test_loaded_tensors_do_not_change_with_the_file(path):
    save_tensors(path, {"a": torch.ones(1000)})
    loaded = load_tensors(path, None, max_bytes=MANY)
    with path.open("r+b") as handle:
        handle.seek(-4000, os.SEEK_END)
        handle.write(b"\xff" * 4000)
    assert torch.equal(loaded["a"], torch.ones(1000))


def test_tensors_are_made_of_the_very_bytes_that_were_digested(path, monkeypatch):
    """The attack: a host that serves the signed file once, and another one ever after."""
    save_tensors(path, {"a": torch.ones(3)})
    good = path.read_bytes()
    digest = hashlib.sha256(good).hexdigest()
    opened = []

    @contextmanager
    def served(path, subject):
        opened.append(path)
        data = good if len(opened) == 1 else good[:-1] + b"x"
        yield io.BytesIO(data), len(data)

    monkeypatch.setattr("ddm.io.tensors.open_regular", served)
    assert torch.equal(load_tensors(path, None, max_bytes=MANY, digest=digest)["a"], torch.ones(3))
    with pytest.raises(DigestError):
        load_tensors(path, None, max_bytes=MANY, digest=digest)
    assert len(opened) == 2


def test_loading_needs_memory_for_about_one_file(path):
    """In a process of its own, whose peak tells; the control needs two."""
    save_tensors(path, {"a": torch.zeros(16_000_000)})
    program = (
        "import re, sys; from pathlib import Path; import torch; from ddm.io.tensors import load_tensors\n"
        "peak = lambda: int(re.search('VmHWM:.*?([0-9]+)', Path('/proc/self/status').read_text())[1])\n"
        "before = peak()\n"
        "loaded = load_tensors(Path(sys.argv[1]), None, max_bytes=10**8)\n"
        "copies = [loaded['a'].clone() for _ in range(int(sys.argv[2]))]\n"
        "print((peak() - before) / 62_500)"
    )

    def files_in_memory(num_copies: int) -> float:
        command = [sys.executable, "-c", program, str(path), str(num_copies)]
        return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert files_in_memory(0) < 1.5 < files_in_memory(1)


def test_header_is_read_without_torch_and_agrees_with_the_tensors(path):
    save_tensors(path, tensors())
    assert read_header(path, max_bytes=MANY) == {
        name: spec_of(tensor) for name, tensor in tensors().items()
    }
    program = (
        "import sys; from pathlib import Path; from ddm.io.tensors import read_header\n"
        "read_header(Path(sys.argv[1]), max_bytes=10**6); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 0


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickle_is_refused_and_named(path, protocol):
    assert "pickle" in (refused(path, pickle.dumps({"a": [1.0] * 100}, protocol)).got or "")


def test_torch_save_is_refused_and_named_a_pickle(path):
    buffer = io.BytesIO()
    torch.save(tensors(), buffer)
    assert "pickle" in (refused(path, buffer.getvalue()).got or "")


def test_honest_header_whose_length_looks_like_a_pickle_is_read(path):
    """640 is 0x80 0x02 in the file, as a pickle of protocol 2 begins."""
    header = json.dumps({"a": entry(0, 4)}).encode()
    path.write_bytes(raw(header + b" " * (640 - len(header)), b"\0" * 4))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_header(path, max_bytes=MANY) == {"a": TensorSpec("F32", (1,))}


def test_malformed_file_is_refused(path):
    for name, data in [
        ("empty file", b""),
        ("seven bytes", b"\x02\0\0\0\0\0\0"),
        ("header bomb", struct.pack("<Q", 2**63) + b"{}"),
        ("header above 1 MiB", raw(b"{" + b" " * (1024 * 1024) + b"}")),
        ("header beyond the file", struct.pack("<Q", 100) + b"{}"),
        ("no object", raw([])),
        ("not UTF-8", raw(b'{"\xff": 1}')),
        ("leading blank", raw(b' {"a": 1}')),
        ("nested deeply", raw(b'{"a":' * 5000 + b"1" + b"}" * 5000)),
        (
            "duplicate names",
            raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), b"\0" * 4),
        ),
        (
            "duplicate fields",
            raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        ),
        ("overlapping offsets", raw({"a": entry(0, 4), "b": entry(0, 4)}, b"\0" * 4)),
        (
            "partly overlapping offsets",
            raw({"a": entry(0, 8, shape=(2,)), "b": entry(4, 12, shape=(2,))}, b"\0" * 12),
        ),
        ("a gap", raw({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12)),
        ("a gap at the start", raw({"a": entry(4, 8)}, b"\0" * 8)),
        ("trailing bytes", raw({"a": entry(0, 4)}, b"\0" * 5)),
        ("truncated", raw({"a": entry(0, 4)}, b"\0" * 3)),
        ("negative offset", raw({"a": entry(-4, 0)}, b"")),
        ("reversed offsets", raw({"a": entry(4, 0)}, b"\0" * 4)),
        ("length that is not the shape's", raw({"a": entry(0, 8)}, b"\0" * 8)),
        ("zero dimension", raw({"a": entry(0, 0, shape=(0,))})),
        ("negative dimensions", raw({"a": entry(0, 4, shape=(-1, -1))}, b"\0" * 4)),
        ("dimension that is a boolean", raw({"a": entry(0, 4, shape=(True,))}, b"\0" * 4)),
        ("dimension that is a float", raw({"a": entry(0, 4, shape=(1.0,))}, b"\0" * 4)),
        ("many dimensions", raw({"a": entry(0, 4, shape=(1,) * 17)}, b"\0" * 4)),
        ("product beyond every integer", raw({"a": entry(0, 4, shape=(2**39,) * 16)}, b"\0" * 4)),
        ("number of many digits", raw({"a": entry(0, 10**4000)}, b"\0" * 4)),
        ("unknown dtype", raw({"a": entry(0, 4, dtype="F4")}, b"\0" * 4)),
        ("dtype that is a list", raw({"a": entry(0, 4) | {"dtype": ["F32"]}}, b"\0" * 4)),
        ("unknown field", raw({"a": entry(0, 4) | {"x": 1}}, b"\0" * 4)),
        ("missing field", raw({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4)),
        ("empty name", raw({"": entry(0, 4)}, b"\0" * 4)),
        ("long name", raw({"a" * 513: entry(0, 4)}, b"\0" * 4)),
        ("metadata that is no text", raw({"__metadata__": {"a": 1}})),
        ("metadata that is a list", raw({"__metadata__": []})),
        ("large metadata", raw({"__metadata__": {"a": "b" * 4096}})),
        ("NaN in the header", raw(b'{"a": NaN}')),
    ]:
        with case(name=name, data=data):
            path.write_bytes(data)
            with pytest.raises(TensorFileError):
                read_header(path, max_bytes=4 * MANY)
            refused(path, data, max_bytes=4 * MANY)


def test_file_above_its_bound_is_refused(path):
    save_tensors(path, tensors())
    size = path.stat().st_size
    assert read_header(path, max_bytes=size)
    refused(path, path.read_bytes(), max_bytes=size - 1)


def test_single_value_that_is_not_finite_is_refused(path):
    for value, dtype in product(
        [float("nan"), float("inf"), -float("inf")],
        [torch.float64, torch.float32, torch.float16, torch.bfloat16],
    ):
        with case(value=value, dtype=dtype):
            bad = torch.zeros(1000, dtype=dtype)
            bad[617] = value
            save_tensors(path, {"good": torch.ones(3), "bad": bad})
            assert "tensor bad" in refused(path, path.read_bytes()).subject


def test_value_above_the_bound_is_refused_and_at_the_bound_is_not(path):
    save_tensors(path, {"a": torch.tensor([3.0, -4.0]), "count": torch.tensor([1000])})
    assert load_tensors(path, None, max_bytes=MANY, max_abs=4.0)
    refused(path, path.read_bytes(), max_abs=3.9)


def test_tensors_that_are_not_exactly_those_expected_are_refused(path):
    save_tensors(path, {"a": torch.ones(2, 3), "b": torch.ones(1)})
    right = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("F32", (1,))}
    assert load_tensors(path, right, max_bytes=MANY)
    wrong = [
        right | {"a": TensorSpec("F32", (3, 2))},
        right | {"a": TensorSpec("F32", (6,))},
        right | {"a": TensorSpec("F16", (2, 3))},
        right | {"c": TensorSpec("F32", (1,))},
        {"a": right["a"]},
        {},
    ]
    data = path.read_bytes()
    for expected in wrong:
        refused(path, data, expected=expected)
        with pytest.raises(TensorFileError):
            check_tensors(right, expected, "x")


def test_links_pipes_folders_and_absent_files_are_refused(path, tmp_path):
    save_tensors(tmp_path / "real", tensors())
    path.symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for other in (path, tmp_path / "pipe", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(TensorFileError):
            read_header(other, max_bytes=MANY)


def test_nothing_is_written_that_would_not_be_read(path):
    for content, metadata in [
        ({"a": torch.ones(0)}, None),
        ({"a": torch.ones(1, dtype=torch.complex64)}, None),
        ({"a" * 600: torch.ones(1)}, None),
        ({"a": torch.ones(1)}, {"x": "y" * 5000}),
        ({str(i).zfill(400): torch.ones(1) for i in range(3000)}, None),
    ]:
        with case(content=content, metadata=metadata):
            with pytest.raises(TensorFileError):
                save_tensors(path, content, metadata)
            assert list(path.parent.iterdir()) == []


def test_write_that_fails_leaves_the_old_file_and_no_other(path, monkeypatch):
    save_tensors(path, {"a": torch.ones(1)})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_tensors(path, {"a": torch.zeros(1)})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
numbers = st.integers(-5, 20) | st.sampled_from([2**31, 2**63, 2**64, True, 1.0, None, "1"])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8", "BF16", "F8_E4M3", "f32", 1, None]),
        "shape": st.lists(numbers, max_size=3) | st.none(),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)


@FUZZ
@given(st.binary(max_size=200), st.binary(max_size=30))
def test_any_bytes_are_read_or_refused_but_never_crash(path, header, data):
    for content in (header, raw(header, data), raw(b"{" + header + b"}", data)):
        path.write_bytes(content)
        try:
            specs = read_header(path, max_bytes=MANY)
        except TensorFileError:
            continue
        assert sum(spec.bytes for spec in specs.values()) <= len(content)


@FUZZ
@given(
    st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries, max_size=3),
    st.integers(0, 40),
)
def test_whatever_is_accepted_the_library_reads_the_same(path, header, length):
    data = raw(header, b"\0" * length)
    path.write_bytes(data)
    try:
        specs = read_header(path, max_bytes=MANY)
    except TensorFileError:
        return
    assert {name: spec_of(tensor) for name, tensor in reference_load(data).items()} == specs


@FUZZ
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.float32, torch.int8, torch.bfloat16]),
            st.lists(st.integers(1, 4), max_size=3),
        ),
        max_size=5,
    )
)
def test_whatever_is_written_is_read_back_the_same(path, content):
    tensors = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in content.items()}
    save_tensors(path, tensors)
    assert path.read_bytes() == reference_save(tensors)
    loaded = load_tensors(path, None, max_bytes=MANY)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


BLOCK = 1 << 20
BAD_VALUES = (float("nan"), float("inf"), -float("inf"), 1e5, -1e5)


def sparse(path, gib: float, last: float = 0.0) -> dict[str, TensorSpec]:
    """A file of zeros that takes no disk, but for its last value; two tensors, so that one block is cut short."""
    specs = {"a": TensorSpec("F32", (3,)), "b": TensorSpec("F32", (int(gib * 2**28),))}
    size = sum(spec.bytes for spec in specs.values())
    with path.open("wb") as handle:
        handle.write(
            raw({"a": entry(0, 12, shape=(3,)), "b": entry(12, size, shape=specs["b"].shape)})
        )
        handle.truncate(handle.tell() + size)
        handle.seek(-4, os.SEEK_END)
        handle.write(struct.pack("<f", last))
    return specs


def test_value_is_refused_however_far_out_in_a_file_it_stands(path):
    for read, value in product([load_tensors, check_file], BAD_VALUES):
        with case(read=read, value=value):
            gib = 3 * BLOCK / 2**30 + 1e-6
            with pytest.raises(TensorFileError, check=has_subject("x.safetensors, tensor b")):
                read(path, sparse(path, gib, last=value), max_bytes=10**7, max_abs=1e4)
            read(path, sparse(path, gib, last=1e4), max_bytes=10**7, max_abs=1e4)


def test_other_bytes_are_called_that_and_nothing_else_whatever_is_in_them(path):
    """The attack: a file that nobody signed, which breaks every other rule as well."""
    for read, data in product(
        [load_tensors, check_file],
        [
            b"",
            b"\x80\x05",
            raw(b"{{{"),
            raw({"b": entry(0, 4)}, b"abcd"),
            raw({"a": entry(0, 4)}, b"\0\0\xc0\x7f"),
        ],
    ):
        with case(read=read, data=data):
            specs = {"a": TensorSpec("F32", (1,))}
            save_tensors(path, {"a": torch.ones(1)})
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            read(path, specs, max_bytes=MANY, digest=digest)
            path.write_bytes(data)
            with pytest.raises(DigestError):
                read(path, specs, max_bytes=MANY, digest=digest)
            with pytest.raises(TensorFileError):
                read(path, specs, max_bytes=MANY)


def mebibytes(act: Callable[[], object]) -> float:
    """What an act takes at its peak."""
    outcome = attempt(act, mib=1024, cpu_s=60)
    assert outcome.error is None, outcome
    return outcome.mib


def test_large_file_is_checked_in_the_memory_of_a_block(path):
    specs = sparse(path, 0.25)
    assert mebibytes(lambda: check_file(path, specs, max_bytes=2**40)) < 32
    assert mebibytes(lambda: load_tensors(path, specs, max_bytes=2**40)) > 250


@pytest.mark.parametrize(
    ("prefix", "attribute"), [("_orig_mod.", "net._orig_mod."), ("module.", "net.module.")]
)
def test_names_of_a_wrapped_network_are_refused_with_the_line_that_saves_them_without(
    prefix: str, attribute: str
) -> None:
    expected = {"a.weight": TensorSpec("F32", (2,)), "a.bias": TensorSpec("F32", (2,))}
    wrapped = {prefix + name: spec for name, spec in expected.items()}
    with pytest.raises(TensorFileError) as refused:
        check_tensors(wrapped, expected, "x")
    assert attribute in refused.value.remedy
    check_tensors(
        {name.removeprefix(prefix): spec for name, spec in wrapped.items()}, expected, "x"
    )
