"""What tests look at in an error of ours: what it is about, so that its wording can improve."""

from collections.abc import Callable

from ddm.errors import ArchipelagoError


def has_subject(part: str) -> Callable[[ArchipelagoError], bool]:
    """Return a check for `pytest.raises(..., check=...)`: the error's subject contains `part`."""

    def check(error: ArchipelagoError) -> bool:
        return part in error.subject

    return check
