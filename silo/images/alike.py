"""Near duplicates: pictures whose difference hashes are close, as after another compression, size or brightness."""

# Shape legend: N pictures, B bands.
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_DIFFERENT_BITS = 15  # of 256, between the hashes of near duplicates
_NUM_WORDS = 4  # of 64 bits, in a hash
# With at most 15 bits that differ, at least one of sixteen bands of 16 bits is equal.
_NUM_BANDS = 16
_NUM_NEIGHBOURS = 32  # that a picture is compared with, in each band


def near_duplicates(hashes: Sequence[str]) -> int:
    """Count the pictures that are close to another one that is not counted: all but one of each pair.

    Each picture is compared with at most 32 others in each of sixteen orders, so that time grows with N log N; in large
    crowds of similar pictures the count is a lower bound.

    Args:
        hashes: of pictures that are not equal, from `ddm.images.record.difference_hash`.
    """
    if len(hashes) < 2:
        return 0
    bits = np.frombuffer(bytes.fromhex("".join(hashes)), np.dtype(">u8"))
    code_N4 = bits.reshape(-1, _NUM_WORDS).astype(np.uint64)
    band_NB = np.ascontiguousarray(code_N4).view(np.uint16)
    is_near_N = np.zeros(len(code_N4), bool)
    for band in range(_NUM_BANDS):
        # Pictures with an equal band stand together in this order, and among them those whose whole hash is close.
        order_N = np.lexsort((*code_N4.T, band_NB[:, band]))
        for step in range(1, min(_NUM_NEIGHBOURS, len(order_N) - 1) + 1):
            first = order_N[:-step]
            second = order_N[step:]
            same_band = band_NB[first, band] == band_NB[second, band]
            first = first[same_band]
            second = second[same_band]
            is_close = _distance(code_N4[first], code_N4[second]) <= MAX_DIFFERENT_BITS
            # The later one of a pair is counted, so that one picture of each group never is.
            is_near_N[np.maximum(first, second)[is_close]] = True
    return int(is_near_N.sum())


def _distance(first_N4: NDArray[np.uint64], second_N4: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.asarray(np.bitwise_count(first_N4 ^ second_N4).sum(1, dtype=np.int64))
