"""The program that decodes: it reads requests, one JSON a line, and answers with what it found; it can write no file.

The kernel bounds its memory before it opens anything. What libraries print is discarded: it may quote tags.
"""

import json
import os
import resource
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ddm.errors import SetupError
from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.patients import PatientRule, order_of
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason
from ddm.images.record import PictureRecord, fingerprint, record_of
from ddm.system.guard import end_with_parent
from ddm.system.secrecy import forbid_core_dumps

HEADER = struct.Struct(">IQ")  # length in bytes of an answer's JSON, and of the values after it
READY = b'{"ready": true}'
_BLOCK_BYTES = 1 << 20
_MAX_CONTENT_BYTES = 1 << 26  # of a file that is read at once, for its digest and its decoder
# pydicom imports these to download its test files, which takes a third of its start.
_UNNEEDED_MODULES = ("requests", "tqdm")


@dataclass(frozen=True)
class _Secrets:
    """How patients' identifiers become digests: the keys, and which characters distinguish patients."""

    key: bytes
    order_key: bytes
    patient_rule: PatientRule


def set_bounds(limits: DecodeLimits) -> None:
    """Bound this process: its address space; no file written; no core dump, which would hold pixels."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    forbid_core_dumps()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more, or until memory ran out once: a fresh process then takes over."""
    end_with_parent()
    first_line = requests.readline()
    settings = json.loads(first_line)
    limits = DecodeLimits(**settings["limits"])
    secrets = _Secrets(
        bytes.fromhex(settings["key"]),
        bytes.fromhex(settings["order"]),
        settings["patient_rule"],
    )
    set_bounds(limits)
    _write(answers, READY)  # from here on, time counts against the files
    answers.flush()
    for line in requests:
        request = json.loads(line)
        end = _answer_request(request, limits, secrets, answers)
        text = json.dumps(end)
        _write(answers, text.encode())
        answers.flush()  # once a file, since each flush wakes up the reader
        if end.get("reason") == Reason.MEMORY:
            return


def _answer_request(
    request: Mapping[str, Any],
    limits: DecodeLimits,
    secrets: _Secrets,
    answers: IO[bytes],
) -> dict[str, Any]:
    """Answer with each picture of a file; return the answer about its end."""
    digest = ""
    try:
        data = _read_at_once(request["files"])
        parts: Iterable[bytes]
        if data is None:
            parts = _read_in_parts(request["files"])
        else:
            parts = (data,)
        digest = fingerprint(b"content", parts, secrets.key)
        if digest == request["digest"]:
            return {"end": digest, "same": True}
        for picture in decode(FileContent.of(Path(request["path"]), data), limits):
            _answer_picture(answers, picture, secrets, with_values=request["values"])
        return {"end": digest}
    except ImageError as error:
        return {"end": digest, "reason": error.reason, "detail": error.detail}
    except SetupError as error:
        return {"end": "", "setup": error.got, "remedy": error.remedy}
    except OSError as error:
        reason = Reason.FORBIDDEN
        if isinstance(error, FileNotFoundError):
            reason = Reason.MISSING
        return {"end": "", "reason": reason, "detail": os.strerror(error.errno or 0)}
    except MemoryError:
        return {"end": "", "reason": Reason.MEMORY}


def _answer_picture(
    answers: IO[bytes],
    picture: DecodedPicture | ImageError,
    secrets: _Secrets,
    *,
    with_values: bool,
) -> None:
    if isinstance(picture, ImageError):
        record = PictureRecord(reason=picture.reason.value, detail=picture.detail)
    else:
        record = record_of(picture, secrets.key, secrets.patient_rule)
    if not with_values or isinstance(picture, ImageError):
        _write(answers, record.model_dump_json().encode())
        return
    answer: dict[str, Any] = {
        "picture": {"spacing": picture.spacing, "window": picture.window, "full": picture.full},
        "spacing_in_mm": picture.spacing_in_mm,
        "record": record.model_dump_json(),
    }
    if secrets.order_key:
        answer["order"] = order_of(picture.patient, secrets.order_key, secrets.patient_rule)
    text = json.dumps(answer)
    values_as_bytes = picture.values.reshape(-1).view("u1")
    _write(answers, text.encode(), values_as_bytes.data)


def _write(
    answers: IO[bytes],
    data: bytes,
    values: memoryview | None = None,
) -> None:
    num_value_bytes = 0
    if values is not None:
        num_value_bytes = values.nbytes
    answers.write(HEADER.pack(len(data), num_value_bytes) + data)
    if values is not None:
        answers.write(values)


def _read_at_once(files: list[str]) -> bytes | None:
    """Return the content of a file, for its digest and its decoder; None if it is large, or if there are several."""
    if len(files) > 1:
        return None
    with open(os.fsencode(files[0]), "rb", buffering=0) as handle:  # noqa: PTH123 - names of any bytes
        size = os.fstat(handle.fileno()).st_size
        if size > _MAX_CONTENT_BYTES:
            return None
        return handle.read(size + 1)


def _read_in_parts(files: list[str]) -> Iterator[bytes]:
    """Yield the content of files, one after the other, each after its length if there are several."""
    for file in files:
        with open(os.fsencode(file), "rb", buffering=0) as handle:  # noqa: PTH123 - names of any bytes
            if len(files) > 1:
                yield b"%d " % os.fstat(handle.fileno()).st_size
            while block := handle.read(_BLOCK_BYTES):
                yield block


def main() -> None:
    """Serve standard input and output, which nothing else in this process can reach then."""
    warnings.simplefilter("ignore")
    for name in _UNNEEDED_MODULES:
        sys.modules[name] = None  # type: ignore[assignment] # as if it were not installed
    # Libraries in C print to descriptor 1 directly, and what they print must not come among the answers.
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with (
        os.fdopen(0, "rb", closefd=False) as requests,
        os.fdopen(answers, "wb", buffering=1 << 16) as out,
    ):
        serve(requests, out)


if __name__ == "__main__":
    main()
