"""What a stranger makes of an honest document: changes that know its structure, and changes that know nothing."""

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

# JSON text, also such as no JSON writer would write.
POISON = (
    *(
        "null",
        "true",
        "0",
        "-1",
        "1.5",
        "-0.0",
        "1e308",
        "1e999",
        "NaN",
        "Infinity",
        "-Infinity",
        "[]",
        "{}",
        '""',
    ),
    *(
        "9007199254740991",
        "9007199254740992",
        "9" * 400,
        "9" * 5000,
        "1" + "0" * 30,
        "0.1e-400",
        "1E400",
        "01",
        "+1",
    ),
    *(
        '"\\ud800"',
        '"\\u0000"',
        '"\\u202e"',
        '"\ufeff"',
        '"\x7f"',
        "'x'",
        '"\\x"',
        '"',
        "/**/1",
        "[1,]",
        '{"a":1,}',
    ),
    *(
        '"' + "x" * 5000 + '"',
        "[" * 40 + "]" * 40,
        '{"a":' * 40 + "1" + "}" * 40,
        "[" * 40,
        "[[[[[[[]]]]]]]",
    ),
    *(
        '"0001-01-01T00:00:00+23:59"',
        '"9999-12-31T23:59:59-23:59"',
        '"2999-99-99T99:99:99Z"',
        '"2026-11-21"',
    ),
    *(
        '".."',
        '"../x"',
        '"/etc/passwd"',
        '"a\\\\b"',
        '"a/../b"',
        '"a//b"',
        '"CON"',
        '"\\u0661"',
        '"\\uff0e\\uff0e/x"',
    ),
    *(
        '{"kind":"x"}',
        '{"kind":null}',
        '[[],{},"",0]',
        '{"":{"":{"":[]}}}',
        '{"__proto__":1}',
        '{"a":1,"a":1}',
    ),
)


def json_paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in a JSON value, the whole included: the keys and indices that lead there."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    return [at, *(place for key, child in children for place in json_paths(child, (*at, key)))]


def replace_at(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return `value` with `new` at one place."""
    if not at:
        return new
    changed = value.copy()
    changed[at[0]] = replace_at(value[at[0]], at[1:], new)
    return changed


def value_at(value: Any, place: tuple[Any, ...]) -> Any:
    """Return what stands at one place."""
    for key in place:
        value = value[key]
    return value


def with_text(value: Any, place: tuple[Any, ...], text: str, *, sort: bool = False) -> bytes:
    """Return JSON with `text`, as it is, at one place."""
    mark = "@@here@@"
    spoiled = json.dumps(
        replace_at(value, place, mark), separators=(",", ":"), sort_keys=sort, ensure_ascii=False
    )
    return spoiled.replace(f'"{mark}"', text).encode("utf-8", "surrogatepass")


@st.composite
def mutated_json(draw: st.DrawFn, sample: bytes) -> bytes:
    """Change one to three places of a JSON sample; the keys stay sorted, as canonical forms demand."""
    value = json.loads(sample)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(json_paths(value)[1:] or [()]))
        parent = value_at(value, place[:-1]) if place else value
        how = draw(st.sampled_from(["drop", "repeat", "swap", "rename"]))
        if how == "drop" and place:
            kept: Any = []
            if isinstance(parent, dict):
                kept = {key: child for key, child in parent.items() if key != place[-1]}
            value = replace_at(value, place[:-1], kept)
        elif how == "repeat" and isinstance(parent, list):
            value = replace_at(value, place[:-1], parent * draw(st.sampled_from([2, 300])))
        elif how == "swap":
            value = replace_at(
                value, place, value_at(value, draw(st.sampled_from(json_paths(value))))
            )
        elif how == "rename" and place and isinstance(parent, dict):
            value = replace_at(
                value, place[:-1], {**parent, draw(st.text(max_size=12)): parent[place[-1]]}
            )
    place = draw(st.sampled_from(json_paths(value)))
    poison = st.sampled_from(POISON) | st.text(max_size=30).map(json.dumps) | st.integers().map(str)
    return with_text(value, place, draw(poison), sort=True)


@st.composite
def scrambled_bytes(draw: st.DrawFn, sample: bytes) -> bytes:
    """Change bytes of a sample without regard to what they mean."""
    data = bytearray(sample)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 8, 64])))
        new = draw(
            st.binary(max_size=8)
            | st.just(bytes(data[start:end]) * 3)
            | st.sampled_from(
                [b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b'"', b"\\", b"}", b"[" * 200, b'"a":1,']
            )
        )
        data[start:end] = new
    return bytes(data)


def hostile_bytes(sample: bytes) -> st.SearchStrategy[bytes]:
    """Return all of these changes, and bytes that have nothing to do with the sample."""
    trailing = st.sampled_from([b" ", b"\n", b"{}", b"\x00", b",", sample]).map(
        lambda more: sample + more
    )
    return mutated_json(sample) | scrambled_bytes(sample) | trailing | st.binary(max_size=200)
