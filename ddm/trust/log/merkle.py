"""The Merkle tree of RFC 6962: root hash, inclusion proofs, consistency proofs. Pure functions over leaf hashes.

A proof is a list of hashes. Whoever verifies one needs neither the log nor its other entries: an inclusion proof shows
that an entry stands at its place in a tree, a consistency proof that an earlier tree is the beginning of a later one.
"""

import hashlib
from collections.abc import Sequence

from ddm.errors import FormatError, MathError, TrustError

HASH_BYTES = 32
MAX_PROOF_HASHES = 64
MAX_SIZE = 2**53 - 1


def leaf_hash(data: bytes) -> bytes:
    """Hash one entry.

    ``SHA-256(0x00 || data)``

    Source:
        RFC 6962, section 2.1; the prefix keeps an entry from being taken for an inner node.
    """
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash two children.

    ``SHA-256(0x01 || left || right)``

    Source:
        RFC 6962, section 2.1.
    """
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_hash(leaves: Sequence[bytes]) -> bytes:
    """Return the root of the tree over these leaf hashes; the root of the empty tree is the hash of nothing."""
    return _levels(leaves)[-1][0] if leaves else hashlib.sha256(b"").digest()


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Prove that leaf `index` stands in the tree over all leaves, from its sibling up to a child of the root.

    Raises:
        MathError: there is no such leaf.

    Source:
        RFC 6962, section 2.1.1.
    """
    if not 0 <= index < len(leaves):
        raise MathError(
            "index of an inclusion proof", expected=f"0 to {len(leaves) - 1}", got=str(index)
        )
    proof = []
    for level in _levels(leaves)[:-1]:
        if (index ^ 1) < len(level):
            proof.append(level[index ^ 1])
        index //= 2
    return proof


def consistency_proof(leaves: Sequence[bytes], old_size: int) -> list[bytes]:
    """Prove that the tree over the first `old_size` leaves is the beginning of the tree over all of them.

    Raises:
        MathError: `old_size` is not between 1 and the number of leaves.

    Source:
        RFC 6962, section 2.1.2.
    """
    if not 1 <= old_size <= len(leaves):
        raise MathError(
            "old size of a consistency proof", expected=f"1 to {len(leaves)}", got=str(old_size)
        )
    proof: list[bytes] = []
    first, last, whole = 0, len(leaves), True
    while old_size != last - first:
        split = 1 << ((last - first - 1).bit_length() - 1)
        if old_size <= split:
            proof.append(root_hash(leaves[first + split : last]))
            last = first + split
        else:
            proof.append(root_hash(leaves[first : first + split]))
            first, old_size, whole = first + split, old_size - split, False
    if not whole:
        proof.append(root_hash(leaves[first:last]))
    return proof[::-1]


def check_inclusion(
    leaf: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes], subject: str
) -> None:
    """Check an inclusion proof.

    Args:
        leaf: the entry's leaf hash.
        index: its place, from 0.
        size: number of entries of the tree.
        root: the tree's root hash.
        proof: as `inclusion_proof` returns it.
        subject: what the proof belongs to, for errors.

    Raises:
        FormatError: the index is outside the tree, or the proof has a wrong length.
        TrustError: the proof leads to another root.

    Source:
        RFC 9162, section 2.1.3.2, which verifies the proofs of RFC 6962.
    """
    if not 0 <= index < size <= MAX_SIZE:
        raise FormatError(subject, expected=f"an index below the size {size}", got=f"index {index}")
    _check_hashes(proof, subject)
    at, last, found = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            raise FormatError(
                subject,
                expected=f"a proof for a tree of {size} entries",
                got=f"{len(proof)} hashes",
            )
        if at % 2 or at == last:
            found = node_hash(sibling, found)
            while at and not at % 2:
                at, last = at // 2, last // 2
        else:
            found = node_hash(found, sibling)
        at, last = at // 2, last // 2
    if last != 0:
        raise FormatError(
            subject, expected=f"a proof for a tree of {size} entries", got=f"{len(proof)} hashes"
        )
    if found != root:
        expected = f"a proof that leads to the root {root.hex()[:16]}... of {size} entries"
        raise TrustError(subject, expected=expected, got=f"one that leads to {found.hex()[:16]}...")


def check_consistency(
    old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes], subject: str
) -> None:
    """Check that a tree is the beginning of another one.

    Args:
        old_size: number of entries of the earlier tree, at least 1.
        old_root: its root hash.
        size: number of entries of the later tree, not fewer.
        root: its root hash.
        proof: as `consistency_proof` returns it.
        subject: what the proof belongs to, for errors.

    Raises:
        FormatError: the sizes are out of order, or the proof has a wrong length.
        TrustError: the proof leads to another root, or two trees of one size differ.

    Source:
        RFC 9162, section 2.1.4.2.
    """
    if not 1 <= old_size <= size <= MAX_SIZE:
        raise FormatError(subject, expected=f"an earlier size of 1 to {size}", got=str(old_size))
    _check_hashes(proof, subject)
    if old_size == size:
        if proof:
            raise FormatError(
                subject, expected="no hashes between trees of one size", got=f"{len(proof)} hashes"
            )
        _check_root(old_root, root, size, subject)
        return
    # A complete earlier tree is a node of the later one, and the proof does not repeat its hash.
    path = [old_root, *proof] if old_size & (old_size - 1) == 0 else list(proof)
    at, last = old_size - 1, size - 1
    while at % 2:
        at, last = at // 2, last // 2
    if not path:
        raise FormatError(
            subject, expected=f"a proof from {old_size} to {size} entries", got="no hashes"
        )
    old_found = found = path[0]
    for sibling in path[1:]:
        if last == 0:
            got = f"{len(proof)} hashes"
            raise FormatError(
                subject, expected=f"a proof from {old_size} to {size} entries", got=got
            )
        if at % 2 or at == last:
            old_found, found = node_hash(sibling, old_found), node_hash(sibling, found)
            while at and not at % 2:
                at, last = at // 2, last // 2
        else:
            found = node_hash(found, sibling)
        at, last = at // 2, last // 2
    if last != 0:
        raise FormatError(
            subject,
            expected=f"a proof from {old_size} to {size} entries",
            got=f"{len(proof)} hashes",
        )
    _check_root(old_found, old_root, old_size, subject)
    _check_root(found, root, size, subject)


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return every level from the leaves to the root; a node without a sibling moves up as it is."""
    levels = [list(leaves)]
    while len(level := levels[-1]) > 1:
        above = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        levels.append(above + level[len(level) & ~1 :])
    return levels


def _check_hashes(proof: Sequence[bytes], subject: str) -> None:
    if len(proof) > MAX_PROOF_HASHES or any(len(each) != HASH_BYTES for each in proof):
        expected = f"at most {MAX_PROOF_HASHES} hashes of {HASH_BYTES} bytes"
        raise FormatError(
            subject, expected=expected, got=f"{len(proof)} hashes, or one of another length"
        )


def _check_root(found: bytes, root: bytes, size: int, subject: str) -> None:
    if found != root:
        expected = f"the root {root.hex()[:16]}... of {size} entries"
        raise TrustError(
            subject, expected=expected, got=f"a proof that leads to {found.hex()[:16]}..."
        )
