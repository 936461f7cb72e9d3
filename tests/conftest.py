"""What tests share: a published tiny release, made once a session and copied where a test changes it."""

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from ddm.publishing import drawing
from tests.support.browser import browser, one_browser  # noqa: F401, fixtures for every test
from tests.support.federation import PlannedFederation, TinyFederation
from tests.support.submissions import SILO, Arrival, arrive
from tests.support.temporary import MEMORY, has_room_for_tests, make_once
from tests.support.threads import THREADS

# What tests start computes with as many threads; two runs of OpenMP on one processor spend most of it waiting.
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
# Tests write and copy some hundred thousand small files, which takes a third of the processor time in memory.
if has_room_for_tests(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Nothing that is imported is ever garbage; a hundred modules of tests make the collector look for it again and again.
gc.disable()
# hypothesis fails an example that takes longer than others, as one does where other tests run beside it.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


# How many images a report has; those of tests have fewer (`quickly_drawn_reports`).
USUAL_EFFORTS = drawing.EFFORTS

# A shell that starts tests in the background lets them ignore SIGINT, and programs that they start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI a skipped test has not shown what it is there for, and fails; a missing GPU or podman excuses it."""
    report = yield
    excused = any(item.get_closest_marker(name) for name in ("gpu", "containers"))
    if report.skipped and os.environ.get("CI") and not excused:  # type: ignore[attr-defined]
        report.outcome = "failed"  # type: ignore[attr-defined]
        report.longrepr = f"skipped in CI: {report.longrepr}"  # type: ignore[attr-defined]
    return report


FEDERATIONS = tuple(
    f"tests/integration/test_{name}.py" for name in ("federation", "growth", "transport")
)


class FileByFile(LoadScopeScheduling):
    """Each file on one process, in the order of collection; whole federations never beside one another."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "federations" if path in FEDERATIONS else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileByFile:
    """Deal the tests to processes, where there are several: `make test`."""
    config.option.loadscopereorder = False
    return FileByFile(config, log)


def pytest_collection_finish() -> None:
    """From now on, look for garbage among what tests make, and not among what was imported for them."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process waits for it at the end."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in FEDERATIONS)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Networks of a test begin with the same weights, whichever tests ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def as_many_threads_as_asked_for() -> Iterator[None]:
    """One thread, so that parallel test runs share the machine fairly; ARCHIPELAGO_TEST_THREADS asks for others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Return at once from `fsync`, here and not in programs: only a power cut, which no test makes, shows its use."""

    def check_open(file: Any) -> None:
        """Raise the OSError of a descriptor that is not open, as `fsync` does."""
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check_open)
        yield


@pytest.fixture(scope="session", autouse=True)
def quickly_drawn_reports() -> Iterator[None]:
    """Draw the images of a report in two steps, and fewer of them, since tests publish some hundred times."""
    quick = tuple(replace(effort, own=12, mixed=40, steps=2) for effort in USUAL_EFFORTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "EFFORTS", quick)
        yield


@dataclass(frozen=True)
class PublishedRelease:
    """A release and what is behind it.

    Attributes:
        release: its folder.
        root: the root that a researcher pinned.
        plan_id: of its plan.
        tiny: the federation that published it.
    """

    release: Path
    root: Path
    plan_id: str
    tiny: TinyFederation


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of this run, which the processes that tests are dealt to share."""
    own_folder = tmp_path_factory.getbasetemp()
    return own_folder if worker_id == "master" else own_folder.parent


@pytest.fixture(scope="session")
def published_once(shared_folder: Path) -> PublishedRelease:
    """The run's release; tests read it and never change it."""

    def make(folder: Path) -> None:
        tiny = TinyFederation.create(folder, {"east": 60, "north": 120})
        tiny.complete(folder / "release")

    tiny = TinyFederation.open(make_once(shared_folder / "published_once", make))
    return PublishedRelease(tiny.path / "release", tiny.root, tiny.current_plan_id(), tiny)


@pytest.fixture
def published(published_once: PublishedRelease, tmp_path: Path) -> PublishedRelease:
    """A copy of the session's federation and release that a test may change."""
    tiny = published_once.tiny.copy(tmp_path / "copy")
    return PublishedRelease(tiny.path / "release", tiny.root, published_once.plan_id, tiny)


@pytest.fixture(scope="session")
def planned_once(shared_folder: Path) -> PlannedFederation:
    """A federation of two silos whose plan has reached the inbox of one; tests never change it."""

    def make(folder: Path) -> None:
        tiny = TinyFederation.create(folder, {SILO: 40, "south": 30})
        tiny.deliver_plan(SILO, tiny.sign())

    tiny = TinyFederation.open(make_once(shared_folder / "planned_once", make))
    return PlannedFederation(tiny, tiny.current_plan_id())


@pytest.fixture(scope="session")
def sent_once(planned_once: PlannedFederation, shared_folder: Path) -> PlannedFederation:
    """The same, with that silo's submission in its outbox; nothing was taken in."""

    def make(folder: Path) -> None:
        planned_once.tiny.copy(folder).work(SILO)

    tiny = TinyFederation.open(make_once(shared_folder / "sent_once", make))
    return PlannedFederation(tiny, planned_once.plan_id)


@pytest.fixture
def arrival(sent_once: PlannedFederation, tmp_path: Path) -> Arrival:
    """A copy in which the submission has arrived at the aggregator, for a test to tamper with."""
    return arrive(sent_once, tmp_path / "copy")
