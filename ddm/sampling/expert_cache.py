"""Loads experts on first use and keeps as many in memory as fit, dropping the least recently used."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import nn

from ddm.diffusion.path import Expert, Experts
from ddm.errors import SetupError


class LazyExperts:
    """Experts by number, of which at most `memory_bytes` are in memory.

    A caller's own reference to an expert keeps it in memory beyond that limit; `ddm.sampling.mixture` keeps none.

    Args:
        load: loads the expert of a number and checks it against its digest, every time.
        sizes: the bytes of each expert.
        memory_bytes: most bytes of all experts in memory together.

    Raises:
        SetupError: the largest expert alone does not fit.
    """

    def __init__(
        self,
        load: Callable[[int], Expert],
        sizes: Sequence[int],
        memory_bytes: int,
    ) -> None:
        if memory_bytes < max(sizes):
            expected = f"at least {max(sizes)} bytes"
            raise SetupError("memory for experts", expected=expected, got=f"{memory_bytes} bytes")
        self._load = load
        self._sizes = tuple(sizes)
        self._memory_bytes = memory_bytes
        self._loaded: OrderedDict[int, Expert] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, k: int) -> Expert:
        if k not in self._loaded:
            # Room is made first: while an expert is loaded, it counts already.
            room_bytes = self._memory_bytes - self._sizes[k]
            while self._loaded and self.loaded_bytes > room_bytes:
                self._loaded.popitem(last=False)
            # Sampling runs in inference mode, and weights that were made in it could never be differentiated through.
            with torch.inference_mode(False):
                self._loaded[k] = self._load(k)
        self._loaded.move_to_end(k)
        return self._loaded[k]

    @property
    def loaded_bytes(self) -> int:
        """The bytes of the experts that are in memory now."""
        return sum(self._sizes[k] for k in self._loaded)

    def to(self, device: torch.device | str) -> "LazyExperts":
        """Return the same experts, loaded onto another device."""
        load = self._load
        target = torch.device(device)

        def load_onto_device(k: int) -> Expert:
            return _move_expert(load(k), target)

        return LazyExperts(load_onto_device, self._sizes, self._memory_bytes)


def move_experts(experts: Experts, device: torch.device | str) -> Experts:
    """Return experts on a device: copies of networks that are elsewhere, and plain functions as they are."""
    if isinstance(experts, LazyExperts):
        return experts.to(device)
    target = torch.device(device)
    return [_move_expert(experts[k], target) for k in range(len(experts))]


def _move_expert(expert: Expert, device: torch.device) -> Expert:
    if not isinstance(expert, nn.Module):
        return expert
    tensors = [*expert.parameters(), *expert.buffers()]
    if all(_is_on(tensor, device) for tensor in tensors):
        return expert
    # A copy, since the caller's own ensemble stays where it is.
    return deepcopy(expert).to(device)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without an index means any of its type."""
    if tensor.device.type != device.type:
        return False
    return device.index is None or device.index == tensor.device.index
