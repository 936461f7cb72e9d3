"""Near duplicates: pictures whose difference hashes are close, as after another compression, size or brightness."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_BITS = 15  # of 256 in which two hashes of near duplicates may differ
_WORDS, _BANDS = 4, 16  # of 64 bits; of 16: with 15 bits that differ, at least one band is equal
_NEIGHBOURS = 32  # that a picture is compared with, in each band


def near_duplicates(hashes: Sequence[str]) -> int:
    """Count the pictures that are close to another one that is not counted: all but one of each pair.

    Each picture is compared with at most 32 others in each of sixteen orders, so that time grows with N log N; in large
    crowds of like pictures the count is a lower bound.

    Args:
        hashes: of pictures that are not equal, from `ddm.images.record.difference_hash`.
    """
    if len(hashes) < 2:
        return 0
    code_N4 = np.frombuffer(bytes.fromhex("".join(hashes)), np.dtype(">u8")).reshape(-1, _WORDS).astype(np.uint64)
    band_NB = np.ascontiguousarray(code_N4).view(np.uint16)
    counted_N = np.zeros(len(code_N4), bool)
    for band in range(_BANDS):
        order_N = np.lexsort((*code_N4.T, band_NB[:, band]))
        for step in range(1, min(_NEIGHBOURS, len(order_N) - 1) + 1):
            one, other = order_N[:-step], order_N[step:]
            alike = band_NB[one, band] == band_NB[other, band]
            one, other = one[alike], other[alike]
            close = _distance(code_N4[one], code_N4[other]) <= MOST_BITS
            counted_N[np.maximum(one, other)[close]] = True
    return int(counted_N.sum())


def _distance(one_N4: NDArray[np.uint64], other_N4: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.asarray(np.bitwise_count(one_N4 ^ other_N4).sum(1, dtype=np.int64))
