"""Debian's tesseract as a second opinion: whether it reads letters in a part of an image that may hold a line of text.

It runs as a child of the decoder's process, within the bounds of that: it can write no file, its memory and its time
are bounded, and the part comes to it through a pipe. What it reads is compared with a rule and forgotten.
"""

import os
import re
import resource
import shutil
import subprocess
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddm.images.types import Numbers, Values

_PROGRAM = "tesseract"
# 6: one block of text
_COMMAND = (
    "stdin",
    "stdout",
    "--psm",
    "6",
    "-l",
    "eng",
    "--dpi",
    "150",
    "tsv",
)
_LETTER_HEIGHT = 32  # pixels, of what it is given: it reads smaller letters badly
_MAX_FACTOR = 6
_MARGIN = 20  # pixels around what it is given
_MAX_SIDE = 2000  # pixels, of what it is given
_SECONDS = 10
_MEMORY_BYTES = 1 << 30
_MIN_CONFIDENCE = 60  # percent; anatomy gives words, too, but of less
_MIN_LETTERS = 3  # of one word
_NUM_COLUMNS = 12  # of its table: the last but one is the confidence, the last the word


@lru_cache(maxsize=1)
def reader_path() -> str | None:
    """Return where tesseract is installed; None where it is not."""
    return shutil.which(_PROGRAM)


def reads_letters(
    grey_HW: Values,
    top: int,
    left: int,
    height: int,
    length: int,
) -> bool:
    """Return whether tesseract reads a word in a part of an image; False where it is not installed.

    Args:
        grey_HW: the image.
        top: the first row of what may be a line of text.
        left: its first column; the line may continue at both ends.
        height: the height of its letters, pixels.
        length: the length of the line, pixels.
    """
    program = reader_path()
    if program is None:
        return False
    rows = slice(max(0, top - height), top + 2 * height)
    columns = slice(max(0, left - 3 * length), left + 4 * length)
    return _reads_word(program, _prepared(grey_HW[rows, columns], height))


def _prepared(part_HW: Values, letter_height: int) -> NDArray[np.uint8]:
    """Return a part of an image with dark letters on light ground, enlarged, with a margin."""
    part: Numbers = part_HW.astype(np.float32)
    low, high = np.percentile(part, (1, 99))
    # A part of one value has no width between dark and light.
    width = max(float(high - low), 1e-30)
    part = ((part - low) / width).clip(0, 1)
    # Letters cover less than their ground: where most of it is dark, the letters are bright.
    if np.median(part) < 0.5:
        part = 1 - part
    factor = round(_LETTER_HEIGHT / letter_height)
    factor = max(1, min(_MAX_FACTOR, factor))
    longest_side = max(part.shape)
    while factor > 1 and factor * longest_side > _MAX_SIDE:
        factor -= 1
    taller = _enlarged(part, factor, axis=0)
    enlarged = _enlarged(taller, factor, axis=1)
    readable = enlarged[:_MAX_SIDE, :_MAX_SIDE]
    tones = (readable * 255).astype(np.uint8)
    ground = int(np.median(tones))
    return np.pad(tones, _MARGIN, constant_values=ground)


def _enlarged(
    part: Numbers,
    factor: int,
    axis: int,
) -> Numbers:
    """Return a part that is enlarged along one axis, linearly between neighbours: hard steps are not letters to it."""
    num = part.shape[axis]
    last = num - 1
    # Half-pixel centres: place p of the enlarged part is place (p + 1/2) / factor - 1/2 of this one.
    middles = np.arange(num * factor) + 0.5
    places = (middles / factor - 0.5).clip(0, last)
    before = np.floor(places).astype(np.intp)
    after = np.minimum(before + 1, last)
    share = (places - before).astype(np.float32)
    if axis == 0:
        share = share[:, None]
    else:
        share = share[None, :]
    nearer = part.take(before, axis) * (1 - share)
    enlarged: Numbers = nearer + part.take(after, axis) * share
    return enlarged


def _reads_word(program: str, tones_HW: NDArray[np.uint8]) -> bool:
    height, width = tones_HW.shape
    image = b"P5 %d %d 255\n" % (width, height) + tones_HW.tobytes()
    # One thread: several wait for each other longer than they work on a part as small as this.
    environment = {"OMP_THREAD_LIMIT": "1", "PATH": os.defpath}
    try:
        finished = subprocess.run(
            [program, *_COMMAND],
            input=image,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_SECONDS,
            preexec_fn=_bound,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        # The result is then as without tesseract.
        return False
    table = finished.stdout.decode("utf-8", "replace")
    return any(_is_word(line.split("\t")) for line in table.splitlines())


def _bound() -> None:
    """Bound the child: its memory and its time, no file written, no core dump."""
    bounds = {
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_CPU: _SECONDS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 1,  # also where dumps go through a pipe, see `ddm.system.secrecy`
    }
    for kind, bound in bounds.items():
        _, limit = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            # A decoder whose own limit is lower cannot raise it.
            bound = min(bound, limit)
        resource.setrlimit(kind, (bound, bound))


def _is_word(cells: list[str]) -> bool:
    if len(cells) != _NUM_COLUMNS:
        return False
    try:
        confidence = float(cells[-2])
    except ValueError:  # the first line names the columns
        return False
    return confidence >= _MIN_CONFIDENCE and len(re.findall(r"[^\W_]", cells[-1])) >= _MIN_LETTERS
