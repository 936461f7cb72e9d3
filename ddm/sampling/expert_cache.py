"""Experts that are in memory only while there is room: loaded when asked for, the least recently used leaves first."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ddm.diffusion.path import Expert
from ddm.errors import SetupError


class LazyExperts:
    """Experts by number, of which at most `memory_bytes` are in memory.

    Whoever keeps an expert that was asked for, keeps it in memory beyond that; `ddm.sampling.mixture` does not.

    Args:
        load: loads the expert of a number, checked against its digest every time.
        sizes: how many bytes each takes.
        memory_bytes: most bytes that all in memory may take.

    Raises:
        SetupError: not even the largest has room.
    """

    def __init__(self, load: Callable[[int], Expert], sizes: Sequence[int], memory_bytes: int) -> None:
        if memory_bytes < max(sizes):
            raise SetupError("memory for experts", expected=f"at least {max(sizes)} bytes", got=str(memory_bytes))
        self._load = load
        self._sizes = tuple(sizes)
        self._memory_bytes = memory_bytes
        self._loaded: OrderedDict[int, Expert] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, k: int) -> Expert:
        if k not in self._loaded:
            while self._loaded and self.loaded_bytes + self._sizes[k] > self._memory_bytes:
                self._loaded.popitem(last=False)
            self._loaded[k] = self._load(k)
        self._loaded.move_to_end(k)
        return self._loaded[k]

    @property
    def loaded_bytes(self) -> int:
        """What is in memory now."""
        return sum(self._sizes[k] for k in self._loaded)
