"""Reports all problems of a site's data in one error."""

from collections.abc import Sequence

from ddm.errors import DataError


def refuse_all(problems: Sequence[DataError], remedy: str | None = None) -> None:
    """Raise the problems, if there are any.

    Args:
        problems: in the order in which they are listed.
        remedy: the remedy for several of them; by default the remedies of all.

    Raises:
        DataError: the only problem, or one error that lists all of them.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        different_remedies = dict.fromkeys(problem.remedy for problem in problems)
        raise DataError(
            "; ".join(str(problem) for problem in problems),
            remedy=remedy or " ".join(different_remedies),
        )
