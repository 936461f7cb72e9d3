"""Experts within a memory budget: who is loaded, who leaves, and that each loading is verified."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import CosinePath, Expert, LinearPath
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import DigestError, MemoryLimitError, SetupError
from ddm.loading.ensemble import load_ensemble, on_path, open_ensemble
from ddm.loading.release import open_release
from ddm.protocol.learning import ExpertObjective
from ddm.sampling.expert_cache import LazyExperts
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import four_silos
from tests.support.publishing import least_memory


class Disk:
    """Exact experts, loaded as new objects; remembers which were, and how many are alive at the same time."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.alive: weakref.WeakSet[OnDisk] = weakref.WeakSet()
        self.most_alive = 0

    def __call__(self, k: int) -> Expert:
        expert = OnDisk(k)
        self.loaded.append(k)
        self.alive.add(expert)
        self.most_alive = max(self.most_alive, len(self.alive))
        return expert


class OnDisk:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return four_silos().expert(self.k)(x_B, t_B)


def lazy(memory_bytes: int, sizes: tuple[int, ...] = (10, 10, 10, 10)) -> tuple[LazyExperts, Disk]:
    disk = Disk()
    return LazyExperts(disk, sizes, memory_bytes), disk


def test_least_recently_used_expert_leaves() -> None:
    experts, disk = lazy(20)
    for k in (0, 1, 0, 2, 0, 1):
        experts[k]
    assert disk.loaded == [0, 1, 2, 1]
    assert experts.loaded_bytes == 20


def test_budget_counts_bytes_not_experts() -> None:
    experts, disk = lazy(25, (10, 20, 5, 15))
    for k in (0, 2, 3, 1, 2):
        experts[k]
        assert experts.loaded_bytes <= 25
    assert disk.loaded == [0, 2, 3, 1, 2][: len(disk.loaded)]


def test_budget_is_refused_when_the_largest_expert_has_no_room() -> None:
    with pytest.raises(SetupError, check=has_subject("memory for experts")):
        lazy(19, (10, 20, 5, 15))
    assert len(lazy(20, (10, 20, 5, 15))[0]) == 4


def ensemble(experts: LazyExperts | list[Expert]) -> Ensemble:
    return Ensemble(experts, four_silos(), four_silos().prior_K, (2,), chunk_size=16)


def test_samples_are_the_same_within_any_budget_and_it_is_kept() -> None:
    for strategy in ("lock", "sample", "full"):
        whole = ensemble(list(four_silos().experts())).sample(60, strategy=strategy, steps=3)
        for budget in (1, 2, 4):
            with case(strategy=strategy, budget=budget):
                experts, disk = lazy(10 * budget)
                gc.collect()
                assert torch.equal(
                    ensemble(experts).sample(60, strategy=strategy, steps=3).images, whole.images
                )
                assert disk.most_alive == min(budget, len(set(disk.loaded)))
                assert len(set(disk.loaded)) > 2


def test_locked_samples_load_each_expert_once_and_sampled_ones_again_and_again() -> None:
    experts, disk = lazy(10)
    ensemble(experts).sample(200, steps=5)
    assert disk.loaded == [0, 1, 2, 3]
    experts, disk = lazy(20)
    ensemble(experts).sample(200, strategy="sample", steps=5)
    # there and back: the last two of each step are still there for the next
    assert len(disk.loaded) == 4 + 4 * 2
    experts, disk = lazy(20)
    ensemble(experts).sample(
        200, strategy="sample", steps=10, options=SamplingOptions(router_every=2)
    )
    assert len(disk.loaded) == 4 + 4 * 2


def expert_files(published: PublishedRelease) -> list[Path]:
    return sorted(published.release.glob("targets/*/silos/*/experts/*/expert.safetensors"))


def test_expert_is_verified_each_time_it_is_loaded(published: PublishedRelease) -> None:
    least = least_memory(open_release(published.release, root=published.root, state=None))
    opened = open_ensemble(published.release, root=published.root, memory_bytes=least)
    assert isinstance(opened.experts, LazyExperts)
    assert torch.equal(
        opened.sample(8, steps=2).images,
        open_ensemble(published.release, root=published.root).sample(8, steps=2).images,
    )
    for path in expert_files(published):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(DigestError, check=has_subject("expert.safetensors")):
        opened.sample(8, steps=2)


def test_release_is_refused_a_budget_that_holds_no_expert(published: PublishedRelease) -> None:
    release = open_release(published.release, root=published.root, state=None, experts_later=True)
    least = least_memory(release)
    with pytest.raises(
        MemoryLimitError,
        check=has_subject("memory"),
    ):
        load_ensemble(release, memory_bytes=least - 1)
    load_ensemble(release, memory_bytes=least)


def test_expert_that_learned_eps_on_the_cosine_path_answers_on_the_ensembles() -> None:
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t_B = torch.linspace(0.02, 0.95, 50, dtype=torch.float64)
    times: list[Tensor] = []

    def expert(x_B: Tensor, t_B: Tensor, *told_B: Tensor) -> Tensor:
        times.extend(told_B)
        return four_silos(CosinePath()).eps_expert(1)(x_B, t_B)

    truth = four_silos().expert(1)(x, t_B)
    learned = ExpertObjective(path="cosine_vp", prediction="eps")
    assert (on_path(expert, learned, LinearPath())(x, t_B, t_B) - truth).abs().max() < 1e-10
    assert torch.equal(times[0], t_B)
    assert (on_path(expert, ExpertObjective(), LinearPath())(x, t_B) - truth).abs().max() > 0.1
