"""Names the case in which a check fails, for tests that loop over many of a kind."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object, **named: object) -> Iterator[None]:
    """Add the values to whatever a check inside raises: `with case(field=field): assert ...`."""
    try:
        yield
    except BaseException as error:
        # In ASCII: some cases are texts that would write into the terminal of whoever reads the failure.
        words = [ascii(value)[:200] for value in values]
        words += [f"{name}={ascii(value)[:200]}" for name, value in named.items()]
        error.add_note("in the case " + ", ".join(words))
        raise
