"""Several processes in one folder: each model is trained, and each row measured, by one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.errors import BusyError
from ddm.io.locks import lock_file


@contextmanager
def alone(out: Path, name: str, *, wait: bool = False) -> Iterator[None]:
    """Do what has this name as the only process of the folder `out`.

    Raises:
        BusyError: another process does it, and `wait` is false.
    """
    folder = out / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    held = lock_file(folder / name, wait=wait)
    try:
        held.__enter__()
    except BlockingIOError as error:
        raise BusyError(name, expected="nobody at work on it", got="another process") from error
    try:
        yield
    finally:
        held.__exit__(None, None, None)
