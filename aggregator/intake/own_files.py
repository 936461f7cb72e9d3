"""Distinguishes faults of the federation's own files from those of submissions, which alone can be refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddm.errors import ArchipelagoError


class FederationFilesError(Exception):
    """A file of the federation cannot be used: submissions wait until the operator has repaired it."""


@contextmanager
def reading_federation_files() -> Iterator[None]:
    """Read the federation's own files.

    Raises:
        FederationFilesError: takes the place of every error of ours.
    """
    try:
        yield
    except ArchipelagoError as error:
        raise FederationFilesError(str(error)) from error
