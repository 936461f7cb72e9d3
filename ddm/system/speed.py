"""How fast one thread of this machine computes, so that figures of different machines can be compared."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch

_SIDE = 1024
_TRIALS = 5


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def matrix_product_rate() -> float:
    """Return the operations a second of a product of large matrices here, one thread, the best of a few."""
    # The values do not matter: a product of matrices takes as long whatever they hold.
    left = torch.ones(_SIDE, _SIDE)
    right = torch.ones(_SIDE, _SIDE)
    best_s = inf
    with one_thread():
        for _ in range(_TRIALS):
            start = time.perf_counter()
            left @ right
            best_s = min(best_s, time.perf_counter() - start)
    return 2 * _SIDE**3 / best_s
