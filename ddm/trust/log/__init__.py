"""The transparency log of a federation: Merkle tree, proofs, signed checkpoints, tiles, and the memory of readers."""
