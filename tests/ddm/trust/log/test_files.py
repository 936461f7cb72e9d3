"""Proof files, entries, tiles and the memory of a log."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm.errors import DocumentError, FormatError, SplitViewError, TrustError
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import Checkpoint, sign_checkpoint
from ddm.trust.log.checkpoint_store import CheckpointStore
from ddm.trust.log.entries import (
    LogEntry,
    SiloEnrolled,
    VersionPublished,
    check_history,
    encode_entry,
    parse_entry,
)
from ddm.trust.log.merkle import inclusion_proof, leaf_hash, root_hash
from ddm.trust.log.note import VerifierKey
from ddm.trust.log.proof import ConsistencyProofs, InclusionProof, checkpoint_in
from ddm.trust.log.split_view import ProvenCheckpoint, check_same_history
from ddm.trust.log.tiles import layout, parse_bundle, tile_path, tiles_of
from tests.support.case import case
from tests.support.errors import has_subject

ORIGIN = "archipelago/digits/0123456789abcdef"
KEY = SigningKey.generate()
VKEY = VerifierKey(ORIGIN, KEY.public)
ENTRIES = [
    encode_entry(SiloEnrolled(silo_id=f"silo{number}", key_fingerprint="0" * 64))
    for number in range(12)
]


def view(entries: list[bytes], size: int | None = None) -> ProvenCheckpoint:
    """What a log of these entries, cut off at some size, shows."""
    leaves = [leaf_hash(entry) for entry in entries[:size]]
    signed = sign_checkpoint(Checkpoint(ORIGIN, len(leaves), root_hash(leaves)), KEY)
    return ProvenCheckpoint(signed, ConsistencyProofs.from_sizes(leaves, range(1, len(leaves) + 1)))


def forked(at: int) -> list[bytes]:
    """The entries with another one at this place."""
    other = encode_entry(SiloEnrolled(silo_id="mallory", key_fingerprint="f" * 64))
    return [*ENTRIES[:at], other, *ENTRIES[at + 1 :]]


def proof_of(index: int) -> InclusionProof:
    leaves = [leaf_hash(entry) for entry in ENTRIES]
    return InclusionProof(
        index, tuple(inclusion_proof(leaves, index)), view(ENTRIES).signed.encode()
    )


# Proofs


def test_proof_is_written_as_the_specification_shows_it_and_read_again() -> None:
    data = proof_of(5).encode()
    assert data.startswith(b"c2sp.org/tlog-proof@v1\nindex 5\n")
    assert InclusionProof.parse(data, "proof") == proof_of(5)
    assert proof_of(5).check(ENTRIES[5], [VKEY], "proof").size == len(ENTRIES)
    assert (
        checkpoint_in(data, "proof")
        == checkpoint_in(view(ENTRIES).signed.encode(), "c")
        == proof_of(5).checkpoint
    )


def test_proof_with_any_changed_byte_is_refused_or_proves_the_same() -> None:
    data = proof_of(5).encode()
    for at in range(len(data)):
        for bit in (1, 0x20):
            changed = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            with case(at=at, bit=bit), pytest.raises((FormatError, TrustError)):
                InclusionProof.parse(changed, "proof").check(ENTRIES[5], [VKEY], "proof")


def test_proof_of_one_entry_proves_no_other() -> None:
    for index in range(len(ENTRIES)):
        for other in range(len(ENTRIES)):
            if other != index:
                with case(index=index, other=other), pytest.raises(TrustError):
                    proof_of(index).check(ENTRIES[other], [VKEY], "proof")


def test_proof_with_extra_data_or_too_many_hashes_is_refused() -> None:
    data = proof_of(5).encode()
    one = proof_of(5).encode().split(b"\n")[2]
    for wrong in (
        data.replace(b"index 5", b"extra YWJj\nindex 5"),
        data.replace(b"index 5", b"index 5" + (b"\n" + one) * 65),
        data.replace(b"index 5", b"index 05"),
        data.replace(b"@v1", b"@v2"),
    ):
        with pytest.raises(DocumentError):
            InclusionProof.parse(wrong, "proof")


def test_consistency_out_of_order_or_of_other_base64_is_refused() -> None:
    good = ConsistencyProofs.from_sizes([leaf_hash(entry) for entry in ENTRIES], range(1, 13))
    assert ConsistencyProofs.parse(good.encode(), subject="c") == good
    with pytest.raises(DocumentError):
        ConsistencyProofs.parse(good.encode().replace(b'"size":3}', b'"size":2}'), subject="c")
    odd = ConsistencyProofs.model_validate({"proofs": ({"size": 3, "hashes": ("A" * 42 + "B=",)},)})
    with pytest.raises(DocumentError):
        odd.starting_at(3)


# Two histories


@given(seen=st.integers(1, 12), shown=st.integers(1, 12), fork=st.integers(0, 11))
@settings(max_examples=200)
def test_two_views_are_of_one_history_exactly_if_the_fork_is_behind_the_earlier_one(
    seen: int, shown: int, fork: int
) -> None:
    if fork >= min(seen, shown):
        check_same_history(view(ENTRIES, seen), view(forked(fork), shown), "log")
    else:
        with pytest.raises(SplitViewError):
            check_same_history(view(ENTRIES, seen), view(forked(fork), shown), "log")


def test_log_without_a_proof_from_what_was_seen_is_refused() -> None:
    shown = ProvenCheckpoint(view(ENTRIES).signed, ConsistencyProofs())
    with pytest.raises(SplitViewError, check=has_subject("log")):
        check_same_history(view(ENTRIES, 5), shown, "log")


def test_memory_keeps_the_newest_view_and_both_checkpoints_of_a_second_history(
    tmp_path: Path,
) -> None:
    memory = CheckpointStore(tmp_path / "state")
    for size in (5, 9, 7, 9):
        memory.check(view(ENTRIES, size), "log")
        memory.record(view(ENTRIES, size), "log")
        seen = memory.load()
        assert seen is not None
        assert seen.signed.size == (5 if size == 5 else 9)
    with pytest.raises(SplitViewError) as refused:
        memory.record(view(forked(3), 12), "log")
    (folder,) = (tmp_path / "state").glob("split-view-*")
    assert str(folder) in refused.value.remedy
    assert (folder / "seen.checkpoint").read_bytes() == view(ENTRIES, 9).signed.encode()
    assert (folder / "shown.checkpoint").read_bytes() == view(forked(3), 12).signed.encode()
    memory.check(view(ENTRIES, 12), "log")


def test_damaged_memory_is_an_error_and_not_forgotten(tmp_path: Path) -> None:
    memory = CheckpointStore(tmp_path)
    memory.record(view(ENTRIES, 5), "log")
    (tmp_path / "log.json").write_bytes((tmp_path / "log.json").read_bytes()[:-3])
    with pytest.raises(DocumentError, check=has_subject("state")):
        memory.check(view(ENTRIES), "log")


# Entries


def test_entry_in_another_encoding_or_of_an_unknown_kind_is_refused() -> None:
    line = ENTRIES[0]
    assert encode_entry(parse_entry(line, "entry")) == line
    for wrong in (
        line.replace(b":", b": "),
        line.replace(b"silo_enrolled", b"silo_promoted"),
        line + b"\n",
        b"[]",
    ):
        with pytest.raises(DocumentError):
            parse_entry(wrong, "entry")


def released(version: int, digest: str, before: str | None) -> LogEntry:
    return VersionPublished(
        plan_id="digits-00000001",
        version=version,
        manifest_digest=digest * 64,
        supersedes_digest=before * 64 if before else None,
    )


def test_rewritten_missing_or_repeated_version_in_a_log_is_refused() -> None:
    check_history([released(1, "a", None), released(2, "b", "a"), released(3, "c", "b")])
    for wrong in (
        [released(1, "a", None), released(1, "b", None)],
        [released(1, "a", None), released(2, "b", "a"), released(2, "c", "a")],
        [released(1, "a", None), released(3, "c", "a")],
        [released(2, "b", "a")],
        [released(1, "a", None), released(2, "b", "c")],
    ):
        with pytest.raises(TrustError):
            check_history(wrong)


# Tiles


def test_paths_and_widths_of_tiles_are_those_of_the_specification() -> None:
    assert tile_path(0, 1234067, 256) == "tile/0/x001/x234/067"
    assert tile_path(2, 0, 1) == "tile/2/000.p/1"
    assert tile_path(None, 0, 112) == "tile/entries/000.p/112"
    entries = [b""] * 70_000
    names = [path for path, _ in layout(entries)]
    assert len([name for name in names if name.startswith("tile/0/")]) == 274
    assert "tile/0/273.p/112" in names
    assert [name for name in names if name.startswith(("tile/1/", "tile/2/"))] == [
        "tile/1/000",
        "tile/1/001.p/17",
        "tile/2/000.p/1",
    ]
    assert [path for path, _ in layout(entries[:256])] == [
        "tile/entries/000",
        "tile/0/000",
        "tile/1/000.p/1",
    ]


def test_every_hash_of_a_tile_is_the_root_of_its_part_of_the_tree() -> None:
    entries = [number.to_bytes(3, "big") for number in range(600)]
    files = dict(layout(entries))
    leaves = [leaf_hash(number.to_bytes(3, "big")) for number in range(600)]
    assert files["tile/1/000.p/2"] == root_hash(leaves[:256]) + root_hash(leaves[256:512])
    assert files["tile/0/002.p/88"] == b"".join(leaves[512:])
    read = [
        entry
        for i, w in tiles_of(600)
        for entry in parse_bundle(files[tile_path(None, i, w)], w, "bundle")
    ]
    assert read == entries


def test_entry_bundles_that_are_cut_off_too_long_or_empty_are_refused() -> None:
    data = dict(layout(ENTRIES))["tile/entries/000.p/12"]
    for wrong, width in (
        (data[:-1], 12),
        (data + b"\0", 12),
        (data + b"\0\0", 12),
        (data, 11),
        (data, 13),
        (b"", 1),
    ):
        with pytest.raises(DocumentError):
            parse_bundle(wrong, width, "bundle")
