"""The Merkle tree against the published vectors and a naive tree of RFC 6962; altered proofs are refused."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm.errors import FormatError, MathError, TrustError
from ddm.trust.log.merkle import (
    MAX_PROOF_HASHES,
    check_consistency,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    root_hash,
)

# The tree of certificate transparency's own tests: eight entries, and the root over the first n of them.
CT_ENTRIES = [
    "",
    "00",
    "10",
    "2021",
    "3031",
    "40414243",
    "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
REFUSED = (TrustError, FormatError)
some = settings(max_examples=150)


def naive_root(data: Sequence[bytes]) -> bytes:
    """MTH(D[n]) of RFC 6962, section 2.1, as it stands there: over the entries, by recursion."""
    if len(data) < 2:
        return hashlib.sha256(b"\0" + data[0] if data else b"").digest()
    k = naive_split(len(data))
    return hashlib.sha256(b"\1" + naive_root(data[:k]) + naive_root(data[k:])).digest()


def naive_split(n: int) -> int:
    """The largest power of two smaller than n."""
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def naive_path(m: int, data: Sequence[bytes]) -> list[bytes]:
    """PATH(m, D[n]) of RFC 6962, section 2.1.1."""
    if len(data) == 1:
        return []
    k = naive_split(len(data))
    if m < k:
        return [*naive_path(m, data[:k]), naive_root(data[k:])]
    return [*naive_path(m - k, data[k:]), naive_root(data[:k])]


def naive_subproof(m: int, data: Sequence[bytes], whole: bool) -> list[bytes]:
    """SUBPROOF(m, D[n], b) of RFC 6962, section 2.1.2."""
    if m == len(data):
        return [] if whole else [naive_root(data)]
    k = naive_split(len(data))
    if m <= k:
        return [*naive_subproof(m, data[:k], whole), naive_root(data[k:])]
    return [*naive_subproof(m - k, data[k:], False), naive_root(data[:k])]


def leaves_of(data: Sequence[bytes]) -> list[bytes]:
    return [leaf_hash(entry) for entry in data]


def test_roots_are_those_of_certificate_transparency() -> None:
    data = [bytes.fromhex(entry) for entry in CT_ENTRIES]
    assert [root_hash(leaves_of(data[:size])).hex() for size in range(9)] == CT_ROOTS


def test_every_proof_of_a_small_tree_is_that_of_the_naive_tree_and_verifies() -> None:
    for size in range(1, 35):
        data = [bytes([number]) * 3 for number in range(size)]
        leaves = leaves_of(data)
        root = naive_root(data)
        assert root_hash(leaves) == root
        for index in range(size):
            proof = inclusion_proof(leaves, index)
            assert proof == naive_path(index, data)
            check_inclusion(leaves[index], index, size, root, proof, "proof")
        for old in range(1, size + 1):
            proof = consistency_proof(leaves, old)
            assert proof == naive_subproof(old, data, True)
            check_consistency(old, naive_root(data[:old]), size, root, proof, "proof")


@given(data=st.data(), entries=st.lists(st.binary(max_size=6), min_size=1, max_size=600))
@some
def test_proofs_of_any_tree_are_those_of_the_naive_tree_and_verify(
    data: st.DataObject, entries: list[bytes]
) -> None:
    leaves = leaves_of(entries)
    root = naive_root(entries)
    index = data.draw(st.integers(0, len(entries) - 1))
    old = data.draw(st.integers(1, len(entries)))
    assert inclusion_proof(leaves, index) == naive_path(index, entries)
    assert consistency_proof(leaves, old) == naive_subproof(old, entries, True)
    check_inclusion(
        leaves[index], index, len(entries), root, inclusion_proof(leaves, index), "proof"
    )
    check_consistency(
        old, naive_root(entries[:old]), len(entries), root, consistency_proof(leaves, old), "proof"
    )


def altered(data: st.DataObject, proof: list[bytes]) -> list[bytes]:
    """The proof with a flipped bit, without a hash, with one more, or with two exchanged."""
    at = data.draw(st.integers(0, len(proof) - 1)) if proof else 0
    kinds = ["added"] + ["flipped", "dropped"] * bool(proof) + ["swapped"] * (len(set(proof)) > 1)
    match data.draw(st.sampled_from(kinds)):
        case "added":
            return [*proof[:at], data.draw(st.binary(min_size=32, max_size=32)), *proof[at:]]
        case "flipped":
            bit = data.draw(st.integers(0, 255))
            flipped = (int.from_bytes(proof[at], "big") ^ 1 << bit).to_bytes(32, "big")
            return [*proof[:at], flipped, *proof[at + 1 :]]
        case "dropped":
            return proof[:at] + proof[at + 1 :]
    other = next(i for i in range(len(proof)) if proof[i] != proof[at])
    swapped = list(proof)
    swapped[at] = swapped[other]
    swapped[other] = swapped[at]
    return swapped


def another(digest: bytes) -> bytes:
    return bytes([digest[0] ^ 1]) + digest[1:]


@given(data=st.data(), size=st.integers(1, 70))
@some
def test_altered_inclusion_proof_leaf_root_index_or_size_is_refused(
    data: st.DataObject, size: int
) -> None:
    leaves = [leaf_hash(bytes([number])) for number in range(size)]
    index = data.draw(st.integers(0, size - 1))
    proof = inclusion_proof(leaves, index)
    root = root_hash(leaves)
    wrong = [
        (leaves[index], index, size, root, altered(data, proof)),
        (another(leaves[index]), index, size, root, proof),
        (leaves[index], index, size, another(root), proof),
        (leaves[index], size, size, root, proof),
        (leaves[index], -1, size, root, proof),
    ]
    elsewhere = (
        data.draw(st.integers(0, size - 1).filter(lambda at: at != index)) if size > 1 else None
    )
    wrong += [(leaves[index], elsewhere, size, root, proof)] if elsewhere is not None else []
    for given_ in wrong:
        with pytest.raises(REFUSED):
            check_inclusion(*given_, "proof")


@given(data=st.data(), size=st.integers(2, 70))
@some
def test_altered_consistency_proof_or_root_is_refused(data: st.DataObject, size: int) -> None:
    leaves = [leaf_hash(bytes([number])) for number in range(size)]
    old = data.draw(st.integers(1, size - 1))
    proof = consistency_proof(leaves, old)
    old_root = root_hash(leaves[:old])
    root = root_hash(leaves)
    wrong = [
        (old, old_root, size, root, altered(data, proof)),
        (old, another(old_root), size, root, proof),
        (old, old_root, size, another(root), proof),
        (size, root, old, old_root, proof),
        (0, root_hash([]), size, root, proof),
        (size, another(root), size, root, []),
    ]
    for given_ in wrong:
        with pytest.raises(REFUSED):
            check_consistency(*given_, "proof")


@given(data=st.data(), size=st.integers(2, 40))
@some
def test_no_proof_joins_a_forked_tree_to_the_tree_before_the_fork(
    data: st.DataObject, size: int
) -> None:
    """The attack: an entry among the first ones is exchanged; whatever honest proof is shown, it does not fit."""
    leaves = [leaf_hash(bytes([number])) for number in range(size)]
    old = data.draw(st.integers(1, size))
    forged = list(leaves)
    forged[data.draw(st.integers(0, old - 1))] = leaf_hash(b"another")
    for proof in (consistency_proof(leaves, old), consistency_proof(forged, old)):
        with pytest.raises(REFUSED):
            check_consistency(old, root_hash(leaves[:old]), size, root_hash(forged), proof, "proof")


def test_proof_of_more_hashes_than_any_tree_needs_is_refused() -> None:
    leaves = [leaf_hash(b"a"), leaf_hash(b"b")]
    many = [b"\0" * 32] * (MAX_PROOF_HASHES + 1)
    for proof in (many, [b"\0" * 31]):
        with pytest.raises(FormatError):
            check_inclusion(leaves[0], 0, 2**53 - 1, root_hash(leaves), proof, "proof")
        with pytest.raises(FormatError):
            check_consistency(1, leaves[0], 2**53 - 1, root_hash(leaves), proof, "proof")


def test_proof_that_does_not_exist_cannot_be_made() -> None:
    for index in (-1, 2):
        with pytest.raises(MathError):
            inclusion_proof([b"\0" * 32] * 2, index)
    for old in (0, 3):
        with pytest.raises(MathError):
            consistency_proof([b"\0" * 32] * 2, old)
