"""The program that decodes: it reads requests, one JSON a line, and answers with what it saw; it can write no file.

Its memory is bounded by the kernel before it opens anything. What libraries print goes nowhere: it may quote tags.
"""

import json
import os
import resource
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ddm.errors import SetupError
from ddm.images.content import FileContent
from ddm.images.fingerprint import fingerprint
from ddm.images.formats import decode
from ddm.images.patients import order_of
from ddm.images.picture import DecodedPicture, Limits
from ddm.images.reasons import ImageError, Reason
from ddm.images.record import PictureRecord, look
from ddm.system.reaper import end_with_parent

HEADER = struct.Struct(">IQ")  # bytes of an answer's JSON, and of the values that follow it
READY = b'{"ready": true}'
_BLOCK_BYTES = 1 << 20
_MOST_AT_ONCE = 1 << 26  # bytes
_UNNEEDED = ("requests", "tqdm")  # pydicom imports them to download test files, which takes a third of its start
_EXHAUSTED = (Reason.MEMORY,)


def bound(limits: Limits) -> None:
    """Bound this process: its address space, no file written, no image of its memory left behind."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are none, or until memory ran out once: a fresh process then takes over."""
    settings = json.loads(requests.readline())
    limits, key, order = Limits(**settings["limits"]), bytes.fromhex(settings["key"]), bytes.fromhex(settings["order"])
    end_with_parent(settings["parent"])
    bound(limits)
    _write(answers, READY)  # only now does the time of files count
    answers.flush()
    for line in requests:
        request = json.loads(line)
        end: dict[str, Any] = {}
        digest = ""
        try:
            content = _content(request["files"])
            digest = fingerprint(b"content", _parts(request["files"]) if content is None else (content,), key)
            if digest == request["digest"]:
                end = {"end": digest, "same": True}
            else:
                for found in decode(FileContent.of(Path(request["path"]), content), limits):
                    _answer(answers, _seen(found, key), found if request["values"] else None, order)
                end = {"end": digest}
        except ImageError as error:
            end = {"end": digest, "reason": error.reason, "detail": error.detail}
        except SetupError as error:
            end = {"end": "", "setup": error.got, "remedy": error.remedy}
        except OSError as error:
            reason = Reason.MISSING if isinstance(error, FileNotFoundError) else Reason.FORBIDDEN
            end = {"end": "", "reason": reason, "detail": os.strerror(error.errno or 0)}
        except MemoryError:
            end = {"end": "", "reason": Reason.MEMORY}
        _write(answers, json.dumps(end).encode())
        answers.flush()  # once a file: whoever listens wakes up for it
        if end.get("reason") in _EXHAUSTED:
            return


def _seen(found: DecodedPicture | ImageError, key: bytes) -> PictureRecord:
    if isinstance(found, ImageError):
        return PictureRecord(reason=found.reason.value, detail=found.detail)
    return look(found, key)


def _answer(answers: IO[bytes], seen: PictureRecord, found: DecodedPicture | ImageError | None, order: bytes) -> None:
    if isinstance(found, DecodedPicture):
        picture = found
        about = {"spacing": picture.spacing, "window": picture.window, "full": picture.full}
        told = {"order": order_of(found.patient, order)} if order else {}
        data = json.dumps({"picture": about, "seen": seen.model_dump_json(), **told}).encode()
        _write(answers, data, picture.values.reshape(-1).view("u1").data)
    else:
        _write(answers, seen.model_dump_json().encode())


def _write(answers: IO[bytes], data: bytes, values: memoryview | None = None) -> None:
    answers.write(HEADER.pack(len(data), values.nbytes if values is not None else 0) + data)
    if values is not None:
        answers.write(values)


def _content(files: list[str]) -> bytes | None:
    """Return what a file holds, read once for digest and decoder; None of a large one, or of several."""
    if len(files) > 1:
        return None
    with open(os.fsencode(files[0]), "rb", buffering=0) as handle:  # noqa: PTH123 - names of any bytes
        size = os.fstat(handle.fileno()).st_size
        return handle.read(size + 1) if size <= _MOST_AT_ONCE else None


def _parts(files: list[str]) -> Iterator[bytes]:
    """Yield what files hold, one after the other, each after its length where there are several."""
    for file in files:
        with open(os.fsencode(file), "rb", buffering=0) as handle:  # noqa: PTH123 - names of any bytes
            if len(files) > 1:
                yield b"%d " % os.fstat(handle.fileno()).st_size
            while block := handle.read(_BLOCK_BYTES):
                yield block


def main() -> None:
    """Serve standard input and output, which nothing else in this process then reaches."""
    warnings.simplefilter("ignore")
    for name in _UNNEEDED:
        sys.modules[name] = None  # type: ignore[assignment] # as if it were not installed
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with os.fdopen(0, "rb", closefd=False) as requests, os.fdopen(answers, "wb", buffering=1 << 16) as out:
        serve(requests, out)


if __name__ == "__main__":
    main()
