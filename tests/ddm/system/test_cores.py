"""How many cores a process may use, and in how many threads it computes where nobody says otherwise."""

import os
from pathlib import Path

import pytest

from ddm.system.cores import default_threads, usable_cores


@pytest.fixture
def own_cgroup(tmp_path: Path) -> Path:
    """The file that names a process's cgroup, `a/b`."""
    path = tmp_path / "own"
    path.write_text("0::/a/b\n")
    return path


def limit(folder: Path, quota: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{quota}\n")


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("max 100000", "max 100000", 8),
        ("400000 100000", "max 100000", 4),
        ("max 100000", "250000 100000", 2),
        ("400000 100000", "150000 50000", 3),
        ("50000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
        ("no quota", "", 8),
    ],
)
def test_usable_cores_are_those_that_affinity_and_the_smallest_cgroup_quota_leave(
    own_cgroup: Path, tmp_path: Path, inner: str, outer: str, expected: int
) -> None:
    limit(tmp_path / "groups" / "a" / "b", inner)
    limit(tmp_path / "groups" / "a", outer)
    assert usable_cores(own_cgroup, tmp_path / "groups") == expected


def test_usable_cores_are_those_of_the_affinity_when_there_is_no_cgroup(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "none") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("stated", "expected"), [("3", 3), ("5,2", 5), ("100000", 1024), ("0", None), ("many", None)]
)
def test_threads_are_those_of_omp_num_threads_and_one_a_core_when_it_states_no_number(
    stated: str, expected: int | None
) -> None:
    threads = default_threads({"OMP_NUM_THREADS": stated})
    assert threads == (usable_cores() if expected is None else expected)
    assert default_threads({}) == usable_cores()
