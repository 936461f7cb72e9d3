"""Batches drawn beside the step: while the model computes one, threads read and draw the next few.

A batch is a function of the seed and the number of its step, so it is the same regardless of who draws it, and when; a
run that is stopped or killed loses the batches drawn ahead and draws them again. Noise is drawn on the CPU even where a
GPU trains: torch's generators differ between devices, and an expert would then depend on the machine by more than
rounding. What a GPU gets is in pinned memory, and is copied while it works.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from ddm.system.cores import usable_cores

BatchT = TypeVar("BatchT")
_MAX_THREADS = 4
# Batches for each thread.
_AHEAD = 2


def drawing_threads(device: torch.device, num_processes: int) -> int:
    """Return how many threads draw batches: for a GPU a few.

    On a CPU none. In batches of 64 on one core, drawing takes 0.3% to 0.8% of the processor time of a step of an expert
    of a million weights, and 4% of one on 8 x 8 images; that is all that there is to gain, and one thread beside the
    step made small experts no faster, or 3% slower.
    """
    if device.type != "cuda":
        return 0
    return max(1, min(_MAX_THREADS, usable_cores() // num_processes))


@contextmanager
def drawn_ahead(
    draw: Callable[[int], BatchT], first: int, last: int, threads: int
) -> Iterator[Callable[[], BatchT]]:
    """Yield a function that returns the batches of the steps from `first` to before `last`, one a call.

    Args:
        draw: returns the batch of a step; called in other threads, where there are any.
        first: the first step.
        last: the step after the last one.
        threads: how many draw; with 0 a batch is drawn when it is needed.
    """
    if not threads:
        steps = iter(range(first, last))
        yield lambda: draw(next(steps))
        return
    pool = ThreadPoolExecutor(threads, "batches")
    pending = deque[Future[BatchT]]()
    steps_to_draw = iter(range(first, last))

    def submit() -> None:
        step = next(steps_to_draw, None)
        if step is not None:
            pending.append(pool.submit(draw, step))

    def take() -> BatchT:
        # The oldest first, in the order of steps, whichever thread finishes first. An error of drawing is raised here.
        batch = pending.popleft().result()
        submit()
        return batch

    try:
        for _ in range(_AHEAD * threads):
            submit()
        yield take
    finally:
        pool.shutdown(cancel_futures=True)
