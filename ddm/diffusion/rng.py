"""Counter-based random streams: the numbers of sample i, or of training step i, whatever ran before."""

import hashlib
from collections.abc import Sequence

import numpy as np


def stream(
    purpose: str,
    seed: int,
    index: int,
) -> np.random.Generator:
    """Return a generator that depends on its three arguments alone.

    Philox is counter based: making one costs microseconds, its 128-bit keys do not collide in practice (a torch CPU
    generator keeps only 32 bits of its seed), and its raw stream is fixed across machines and releases of numpy.
    Never use it for the noise of a statistic, which comes from the operating system.

    Args:
        purpose: what the numbers are for; different purposes are independent.
        seed: the seed a person chose, >= 0.
        index: the sample or the training step, >= 0.
    """
    # The three are separated by zero bytes, so that no two triples give the same text.
    text = f"{purpose}\0{seed}\0{index}"
    digest = hashlib.sha256(text.encode()).digest()
    # Philox takes a key of 128 bits.
    key = np.frombuffer(digest[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def streams(
    purpose: str, seed: int | Sequence[int], indices: Sequence[int]
) -> list[np.random.Generator]:
    """Return the generators of several samples; see `stream`.

    Args:
        purpose: what the numbers are for.
        seed: the seed of all samples, or one for each of them.
        indices: the samples.
    """
    seeds = [seed] * len(indices) if isinstance(seed, int) else seed
    return [
        stream(purpose, own_seed, index) for own_seed, index in zip(seeds, indices, strict=True)
    ]
