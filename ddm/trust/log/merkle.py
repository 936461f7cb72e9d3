"""The Merkle tree of RFC 6962: root hash, inclusion proofs, consistency proofs. Pure functions over leaf hashes.

A proof is a list of hashes. Anybody who verifies one needs neither the log nor its other entries: an inclusion proof
shows that an entry is at its index in a tree, a consistency proof that an earlier tree is the beginning of a later one.

The verifying functions walk from a leaf to the root, one level a step. `index` is the place of the walk's node in its
level, `last_index` that of the level's last node, as `fn` and `sn` in RFC 9162.
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
    if not leaves:
        return hashlib.sha256(b"").digest()
    return _tree_levels(leaves)[-1][0]


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Prove that leaf `index` is in the tree over all leaves, from its sibling up to a child of the root.

    Raises:
        MathError: there is no such leaf.

    Source:
        RFC 6962, section 2.1.1.
    """
    if not 0 <= index < len(leaves):
        raise MathError(
            "index of an inclusion proof",
            expected=f"0 to {len(leaves) - 1}",
            got=str(index),
        )
    proof = []
    for level in _tree_levels(leaves)[:-1]:
        sibling_index = index ^ 1
        # The last node of an odd level has no sibling: it moves up as it is, and the proof has nothing to add.
        if sibling_index < len(level):
            proof.append(level[sibling_index])
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
            "old size of a consistency proof",
            expected=f"1 to {len(leaves)}",
            got=str(old_size),
        )
    # SUBPROOF(m, D[n], b) of the RFC as a loop: D is leaves[start:end], m the old leaves in it, b is `starts_at_zero`.
    proof: list[bytes] = []
    start = 0
    end = len(leaves)
    num_old = old_size
    starts_at_zero = True
    while num_old != end - start:
        # The largest power of two below the number of leaves: the left subtree is complete.
        num_left = 1 << ((end - start - 1).bit_length() - 1)
        middle = start + num_left
        if num_old <= num_left:
            proof.append(root_hash(leaves[middle:end]))
            end = middle
        else:
            proof.append(root_hash(leaves[start:middle]))
            start = middle
            num_old -= num_left
            starts_at_zero = False
    # Otherwise this subtree is the whole earlier tree, whose root the verifier knows.
    if not starts_at_zero:
        proof.append(root_hash(leaves[start:end]))
    # Verifiers walk upwards, the loop went down.
    return proof[::-1]


def check_inclusion(
    leaf: bytes,
    index: int,
    size: int,
    root: bytes,
    proof: Sequence[bytes],
    subject: str,
) -> None:
    """Check an inclusion proof.

    Args:
        leaf: the entry's leaf hash.
        index: its index in the log, from 0.
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
    wrong_length = FormatError(
        subject,
        expected=f"a proof for a tree of {size} entries",
        got=f"{len(proof)} hashes",
    )
    last_index = size - 1
    node = leaf
    for sibling in proof:
        # More hashes than levels: a longer proof could lead to the root by another path.
        if last_index == 0:
            raise wrong_length
        if _is_right_child(index, last_index):
            node = node_hash(sibling, node)
            index, last_index = _skip_levels_without_sibling(index, last_index)
        else:
            node = node_hash(node, sibling)
        index //= 2
        last_index //= 2
    if last_index != 0:
        raise wrong_length
    if node != root:
        raise TrustError(
            subject,
            expected=f"a proof that leads to the root {root.hex()[:16]}... of {size} entries",
            got=f"one that leads to {node.hex()[:16]}...",
        )


def check_consistency(
    old_size: int,
    old_root: bytes,
    size: int,
    root: bytes,
    proof: Sequence[bytes],
    subject: str,
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
                subject,
                expected="no hashes between trees of one size",
                got=f"{len(proof)} hashes",
            )
        _check_root(old_root, root, size, subject)
        return
    expected = f"a proof from {old_size} to {size} entries"
    path = list(proof)
    # A complete earlier tree (a power of two) is a node of the later one, and the proof does not repeat its hash.
    if old_size & (old_size - 1) == 0:
        path = [old_root, *proof]
    if not path:
        raise FormatError(subject, expected=expected, got="no hashes")

    # The walk starts at the earlier tree's last leaf, or above it at the largest complete subtree that ends there.
    index = old_size - 1
    last_index = size - 1
    while index % 2:
        index //= 2
        last_index //= 2

    # The same hashes lead to both roots: those to the left belong to both trees, those to the right to the later one.
    old_node = path[0]
    node = path[0]
    for sibling in path[1:]:
        if last_index == 0:
            raise FormatError(subject, expected=expected, got=f"{len(proof)} hashes")
        if _is_right_child(index, last_index):
            old_node = node_hash(sibling, old_node)
            node = node_hash(sibling, node)
            index, last_index = _skip_levels_without_sibling(index, last_index)
        else:
            node = node_hash(node, sibling)
        index //= 2
        last_index //= 2
    if last_index != 0:
        raise FormatError(subject, expected=expected, got=f"{len(proof)} hashes")
    _check_root(old_node, old_root, old_size, subject)
    _check_root(node, root, size, subject)


def _is_right_child(index: int, last_index: int) -> bool:
    """Whether the next hash of a proof is to the left of this node.

    Either the node is a right child, or it is the last one of its level and moves up until it has a left sibling.
    """
    return index % 2 == 1 or index == last_index


def _skip_levels_without_sibling(index: int, last_index: int) -> tuple[int, int]:
    """Move a last node up to the level where it is a right child; one that is a right child stays where it is."""
    while index != 0 and index % 2 == 0:
        index //= 2
        last_index //= 2
    return index, last_index


def _tree_levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return every level from the leaves to the root; a node without a sibling moves up as it is."""
    level = list(leaves)
    levels = [level]
    while len(level) > 1:
        above = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            above.append(level[-1])
        level = above
        levels.append(level)
    return levels


def _check_hashes(proof: Sequence[bytes], subject: str) -> None:
    if len(proof) > MAX_PROOF_HASHES or any(len(node) != HASH_BYTES for node in proof):
        raise FormatError(
            subject,
            expected=f"at most {MAX_PROOF_HASHES} hashes of {HASH_BYTES} bytes",
            got=f"{len(proof)} hashes, or one of another length",
        )


def _check_root(
    computed: bytes,
    root: bytes,
    size: int,
    subject: str,
) -> None:
    if computed != root:
        raise TrustError(
            subject,
            expected=f"the root {root.hex()[:16]}... of {size} entries",
            got=f"a proof that leads to {computed.hex()[:16]}...",
        )
