"""The memory that a command may take: what was asked for, or a share of what machine, cgroup and process have left."""

import resource
from pathlib import Path

import pytest

from ddm.errors import MemoryLimitError
from ddm.system import memory
from ddm.system.memory import SHARE, MemoryLimit, available_bytes, mebibytes, memory_limit
from tests.support.errors import has_subject
from tests.support.forked import fork_process, wait_for_exit

GIB = 2**30


def test_limit_is_what_was_asked_for_or_a_share_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory_limit(5).bytes == 5
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    assert memory_limit().bytes == int(SHARE * 100)
    assert "available" in memory_limit().origin


def test_need_above_the_limit_is_refused_with_both_figures_and_what_to_change() -> None:
    limit = MemoryLimit(2 * GIB, "as asked")
    limit.check("memory", 2 * GIB)
    with pytest.raises(MemoryLimitError, check=has_subject("memory")) as refusal:
        limit.check("memory", 3 * GIB)
    assert "--num" in refusal.value.remedy
    with pytest.raises(MemoryLimitError) as refusal:
        limit.check("memory", 10**30, "Use less.")
    assert refusal.value.remedy == "Use less."


def test_need_beyond_any_machine_is_written_in_a_line() -> None:
    assert mebibytes(10**40) == "9.09e+27 TiB"


def group(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 0\n")


def test_cgroup_with_the_least_left_counts_without_the_files_that_it_has_cached(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    groups = tmp_path / "groups"
    free = available_bytes(own, groups)
    group(groups / "a" / "b", "max", 10)
    assert available_bytes(own, groups) == pytest.approx(free, rel=0.5)
    group(groups / "a", "5000000", 4_000_000, cached=200_000)
    assert available_bytes(own, groups) == 1_200_000
    group(groups / "a" / "b", "1000000", 999_999)
    assert available_bytes(own, groups) == 1
    group(groups / "a" / "b", "1000000", 2_000_000)
    assert available_bytes(own, groups) == 0


def test_bound_on_the_address_space_counts() -> None:
    def bounded() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, used + 64 * 2**20))
        assert available_bytes() <= 64 * 2**20

    assert wait_for_exit(fork_process(bounded)) == 0
