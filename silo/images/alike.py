"""Near duplicates: pictures whose difference hashes are close, as after another compression, size or brightness."""

# Shape legend: N pictures, B bands of 16 bits: of sixteen, at least one is equal where at most 15 bits differ.
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_DIFFERENT_BITS = 15  # of 256, between the hashes of near duplicates
_NUM_WORDS = 4  # of 64 bits, in a hash
_NUM_NEIGHBOURS = 32  # that a picture is compared with, in each band


def near_duplicates(hashes: Sequence[str]) -> int:
    """Count the pictures that are close to another one that is not counted: all but one of each pair.

    Each picture is compared with at most 32 others in each of sixteen orders, so that time grows with N log N; in large
    crowds of similar pictures the count is a lower bound.

    Args:
        hashes: the hashes of pictures that are not equal, from `ddm.images.record.difference_hash`.
    """
    num_pictures = len(hashes)
    if num_pictures < 2:
        return 0
    hash_bytes = bytes.fromhex("".join(hashes))
    # Words in the order of this machine, so that their halves may be looked at as bands.
    stored_words = np.frombuffer(hash_bytes, np.dtype(">u8"))
    words = stored_words.astype(np.uint64)
    code_N4 = words.reshape(-1, _NUM_WORDS)
    band_NB = code_N4.view(np.uint16)
    is_near_N = np.zeros(num_pictures, bool)
    num_steps = min(_NUM_NEIGHBOURS, num_pictures - 1)
    for band_N in band_NB.T:
        # In this order pictures with an equal band are neighbours, and among them those whose whole hash is close.
        order_N = np.lexsort((*code_N4.T, band_N))
        for step in range(1, num_steps + 1):
            first = order_N[:-step]
            second = order_N[step:]
            has_same_band = band_N[first] == band_N[second]
            first = first[has_same_band]
            second = second[has_same_band]
            first_code = code_N4[first]
            second_code = code_N4[second]
            distance = _distance(first_code, second_code)
            is_near_pair = distance <= MAX_DIFFERENT_BITS
            # The later one of a pair is counted, so that one picture of each group never is.
            later = np.maximum(first, second)
            is_near_N[later[is_near_pair]] = True
    return int(is_near_N.sum())


def _distance(first_N4: NDArray[np.uint64], second_N4: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return in how many bits each pair of hashes differs."""
    different_bits_N4 = first_N4 ^ second_N4
    num_different_N4 = np.bitwise_count(different_bits_N4)
    return np.asarray(num_different_N4.sum(1, dtype=np.int64))
