"""The one copy that a folder keeps, while two want to write it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ddm.images.array_files import ImageArrays, open_arrays, unpack
from tests.support.case import case


class Slow:
    """A source that waits, once its unpacking has begun, until it may go on."""

    def __init__(
        self, source: ImageArrays, begun: Callable[[], object], may_go_on: threading.Event
    ) -> None:
        self._source = source
        self._begun = begun
        self._may_go_on = may_go_on

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        self._begun()
        assert self._may_go_on.wait(300)
        yield from self._source.unpacked()


def packed(path: Path, value: int) -> ImageArrays:
    np.savez_compressed(path, images=np.full((5, 1, 2, 2), value, np.uint8))
    return open_arrays(path)


@pytest.mark.parametrize("same", [True, False])
def test_whoever_unpacks_second_waits_and_takes_nothing_from_the_first(
    same: bool, tmp_path: Path
) -> None:
    sources = [packed(tmp_path / f"{value}.npz", value) for value in (1, 2)]
    begun = threading.Event()
    may_go_on = threading.Event()
    num_begun = []

    def first_begins() -> None:
        num_begun.append("first")
        begun.set()

    slow = Slow(sources[0], first_begins, may_go_on)
    other = Slow(sources[1 - same], lambda: num_begun.append("second"), may_go_on)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(unpack, slow, tmp_path / "kept")
        assert begun.wait(300)
        second = pool.submit(unpack, other, tmp_path / "kept")
        with pytest.raises(TimeoutError):
            second.result(0.2)
        may_go_on.set()
        with case(of="the first"):
            assert (first.result(300).read(range(5)) == 1).all()
        with case(of="the second"):
            assert (second.result(300).read(range(5)) == 2 - same).all()
    assert num_begun == (["first"] if same else ["first", "second"])
    assert len(list((tmp_path / "kept").glob("*.npy"))) == 1
