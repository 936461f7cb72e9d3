"""Names the case in which a check fails, for tests that loop over many of a kind."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object, **named: object) -> Iterator[None]:
    """Add the values to whatever a check inside raises: `with case(field=field): assert ...`."""
    try:
        yield
    except BaseException as error:
        unnamed_values = [ascii(value)[:200] for value in values]
        error.add_note(
            "in the case "
            + ", ".join(
                [*unnamed_values, *(f"{name}={ascii(it)[:200]}" for name, it in named.items())]
            )
        )
        raise
