"""Draws pictures when a person comes to them, decoded in processes of their own, and keeps a few of them."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.images.picture import DecodeLimits
from ddm.images.workers import DecodedFile, DecodedImage, DecodeJob, DecoderOptions, decode_files
from silo.images.drawing import drawn
from silo.images.review import ReviewPicture

_MAX_VIEWS = 256  # pictures
_CHANGED = "its file changed since the scan: scan again"
_GONE = "its file no longer contains it: scan again"

_Location = tuple[str, int]  # of a picture: path and place


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
        limits: the limits of each file.
        num_processes: the number of processes that decode.
        key: the key of the data set's scans.
    """

    def __init__(
        self,
        limits: DecodeLimits,
        num_processes: int,
        key: bytes,
    ) -> None:
        self._options = DecoderOptions(limits, key, num_processes, with_values=True)
        self._requested = deque[ReviewPicture]()
        self._views = OrderedDict[_Location, View]()  # the oldest first
        # Guards the two above and `_is_ended`.
        self._change = threading.Condition()
        self._is_ended = False
        self._thread = threading.Thread(target=self._work, name="viewer", daemon=True)

    def __enter__(self) -> "Viewer":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._change:
            self._is_ended = True
            self._requested.clear()
            self._change.notify_all()
        self._thread.join()

    def request(self, pictures: Sequence[ReviewPicture]) -> None:
        """Have these pictures drawn, in this order, instead of those that were requested before."""
        with self._change:
            self._requested.clear()
            for picture in pictures:
                if _location(picture) in self._views:
                    self._views.move_to_end(_location(picture))
                else:
                    self._requested.append(picture)
            self._change.notify_all()

    def view(self, picture: ReviewPicture) -> View | None:
        """Return a picture; None where it is not drawn yet."""
        with self._change:
            return self._views.get(_location(picture))

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_ended or self._requested)
                if self._is_ended:
                    return
            self._draw_requested()

    def _draw_requested(self) -> None:
        """Draw until nothing is requested any more; the decoders live as long."""
        in_work: dict[str, dict[int, ReviewPicture]] = {}  # by path, then by place in the file
        next_places: dict[str, int] = {}
        try:
            for answer in decode_files(
                self._jobs(in_work),
                self._options,
                is_cancelled=lambda: self._is_ended,
            ):
                path = answer.job.path
                if isinstance(answer, DecodedImage):
                    place = next_places.get(path, 0)
                    next_places[path] = place + 1
                    picture = in_work[path].pop(place, None)
                    if picture is not None:
                        self._store(picture, _view(picture, answer))
                else:
                    next_places.pop(path, None)
                    for picture in in_work.pop(path).values():
                        self._store(picture, View(problem=_problem(answer)))
        except Exception as error:
            # Of any kind: otherwise a request for these pictures would wait for ever.
            problem = f"it cannot be drawn ({type(error).__name__})"
            if isinstance(error, ArchipelagoError | OSError):
                problem = str(error)
            with self._change:
                unfinished = list(self._requested)
                self._requested.clear()
            for pictures_of_file in in_work.values():
                unfinished += pictures_of_file.values()
            for picture in unfinished:
                self._store(picture, View(problem=problem))

    def _jobs(self, in_work: dict[str, dict[int, ReviewPicture]]) -> Iterator[DecodeJob]:
        """Take what is requested, file by file."""
        while True:
            with self._change:
                if not self._requested:
                    return
                path = self._requested[0].path
                if path in in_work:
                    # It is being decoded for other pictures, and these may be past: it is decoded again afterwards.
                    return
                of_file = [picture for picture in self._requested if picture.path == path]
                self._requested = deque(
                    picture for picture in self._requested if picture.path != path
                )
            in_work[path] = {picture.place: picture for picture in of_file}
            num_bytes = 0
            # The decoder reports what is wrong with the file.
            with suppress(OSError):
                num_bytes = Path(path).stat().st_size
            yield DecodeJob(path, (path,), num_bytes)

    def _store(self, picture: ReviewPicture, view: View) -> None:
        with self._change:
            self._views[_location(picture)] = view
            while len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)


def _location(picture: ReviewPicture) -> _Location:
    return picture.path, picture.place


def _view(picture: ReviewPicture, answer: DecodedImage) -> View:
    if answer.record.reason is not None:
        return View(problem=answer.record.reason)
    # A decision is kept for the pixels that the scan saw: the person must not be shown other ones.
    if answer.picture is None or answer.record.pixels != picture.record.pixels:
        return View(problem=_CHANGED)
    try:
        in_window = drawn(answer.picture, window=True)
        whole = drawn(answer.picture, window=False)
    except (ValueError, MemoryError) as error:
        return View(problem=f"it cannot be drawn ({type(error).__name__})")
    if whole == in_window:
        whole = b""
    return View(in_window, whole)


def _problem(answer: DecodedFile) -> str:
    if answer.reason is None:
        return _GONE
    return answer.reason.value
