"""Has pictures decoded and drawn as a person comes to them, in the decoders' own processes, and keeps a few of them."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.images.jobs import Done, Found, Job
from ddm.images.picture import Limits
from ddm.images.workers import decode_in_order
from silo.images.drawing import drawn
from silo.images.review import Flagged

_KEPT = 256  # pictures
_CHANGED = "its file changed since the scan: scan again"
_GONE = "its file does not give it any more: scan again"

_Name = tuple[str, int]


@dataclass(frozen=True)
class View:
    """A picture for a person's eyes.

    Attributes:
        window: PNG of the values of its window.
        whole: PNG of all of its values.
        problem: why there is neither.
    """

    window: bytes = b""
    whole: bytes = b""
    problem: str = ""


class Viewer:
    """Draws pictures in a thread of its own. Use it in a `with`.

    Args:
        limits: of each file.
        processes: that decode.
        key: of the data set's scans.
    """

    def __init__(self, limits: Limits, processes: int, key: bytes) -> None:
        self._limits, self._processes, self._key = limits, processes, key
        self._wanted = deque[Flagged]()
        self._views = OrderedDict[_Name, View]()
        self._change = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="viewer", daemon=True)

    def __enter__(self) -> "Viewer":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._change:
            self._ended = True
            self._wanted.clear()
            self._change.notify_all()
        self._thread.join()

    def want(self, pictures: Sequence[Flagged]) -> None:
        """Have these drawn, in this order, instead of what was wanted before."""
        with self._change:
            for each in pictures:
                if (each.path, each.place) in self._views:
                    self._views.move_to_end((each.path, each.place))
            self._wanted = deque(each for each in pictures if (each.path, each.place) not in self._views)
            self._change.notify_all()

    def view(self, picture: Flagged) -> View | None:
        """Return a picture; None where it is not drawn yet."""
        with self._change:
            return self._views.get((picture.path, picture.place))

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ended or self._wanted)
                if self._ended:
                    return
            self._draw()

    def _draw(self) -> None:
        """Draw until nothing is wanted; decoders live as long."""
        asked: dict[str, dict[int, Flagged]] = {}
        places: dict[str, int] = {}
        try:
            for found in decode_in_order(
                self._jobs(asked), self._limits, self._key, num=self._processes, ended=lambda: self._ended
            ):
                path = found.job.path
                if isinstance(found, Found):
                    place = places.get(path, 0)
                    places[path] = place + 1
                    if (flagged := asked[path].pop(place, None)) is not None:
                        self._keep(flagged, _view(flagged, found))
                    continue
                places.pop(path, None)
                self._give_up(asked.pop(path).values(), _problem(found))
        except Exception as error:  # of any kind: whoever waits for these pictures would wait for ever
            known = isinstance(error, ArchipelagoError | OSError)
            with self._change:
                wanted, self._wanted = list(self._wanted), deque()
            problem = str(error) if known else f"it cannot be drawn ({type(error).__name__})"
            self._give_up([*(each for file in asked.values() for each in file.values()), *wanted], problem)

    def _jobs(self, asked: dict[str, dict[int, Flagged]]) -> Iterator[Job]:
        """Take what is wanted, file by file."""
        while True:
            with self._change:
                first = self._wanted[0].path if self._wanted else None
                if first is None:
                    return
                together = [each for each in self._wanted if each.path == first]
                self._wanted = deque(each for each in self._wanted if each.path != first)
            if first in asked:  # it is being decoded for other pictures, and they may be past
                with self._change:
                    self._wanted.extend(together)
                return
            asked[first] = {each.place: each for each in together}
            size = 0
            with suppress(OSError):  # the decoder says what is the matter
                size = Path(first).stat().st_size
            yield Job(first, (first,), size)

    def _give_up(self, pictures: Iterable[Flagged], problem: str) -> None:
        for each in list(pictures):
            self._keep(each, View(problem=problem))

    def _keep(self, flagged: Flagged, view: View) -> None:
        with self._change:
            self._views[flagged.path, flagged.place] = view
            while len(self._views) > _KEPT:
                self._views.popitem(last=False)


def _view(flagged: Flagged, found: Found) -> View:
    if found.seen.reason is not None:
        return View(problem=found.seen.reason)
    if found.picture is None or found.seen.pixels != flagged.seen.pixels:
        return View(problem=_CHANGED)
    try:
        window, whole = (drawn(found.picture, window=each) for each in (True, False))
    except (ValueError, MemoryError) as error:
        return View(problem=f"it cannot be drawn ({type(error).__name__})")
    return View(window, b"" if whole == window else whole)


def _problem(done: Done) -> str:
    return _GONE if done.reason is None else done.reason.value
