"""Says all that is wrong with a site's data at once."""

from collections.abc import Sequence

from ddm.errors import DataError


def refuse_all(problems: Sequence[DataError], remedy: str | None = None) -> None:
    """Raise what is wrong, if anything is.

    Args:
        problems: in the order in which they are to be told.
        remedy: for several of them; by default what helps against each.

    Raises:
        DataError: the only one, or one that tells all of them.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        each = dict.fromkeys(problem.remedy for problem in problems)
        raise DataError(
            "; ".join(str(problem) for problem in problems), remedy=remedy or " ".join(each)
        )
