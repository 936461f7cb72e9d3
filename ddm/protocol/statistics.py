"""The documents of statistics: what a plan requires of each, what a submission states, what a ledger pays for.

How a statistic is drawn, and what its noise allows, is in the module of `ddm.statistics` that has the name of its kind.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ddm.protocol.base import Delta, Epsilon, File, Model, Unit

# What an epsilon without noise reads: the largest that the format has, and a promise of nothing.
EXACT = 1000.0

StatisticKind = Literal["counts", "class_counts", "sketch"]
PaidKind = StatisticKind | Literal["expert"]
"""What a debit may cover: statistics, and the private training of an expert."""


class Budget(Model):
    """An (epsilon, delta) under the replace-one relation.

    Attributes:
        epsilon: the bound on the log ratio of probabilities.
        delta: the probability with which this bound may fail; 0 where all noise is Laplace noise.
    """

    epsilon: Epsilon
    delta: Delta


class CountsStatistic(Model):
    """A histogram over public groups of fine centroids, by discrete Laplace noise.

    Attributes:
        epsilon: what the histogram costs.
        num_groups: bins of the histogram; from the number of coarse clusters to that of fine centroids.
    """

    delta: ClassVar[float] = 0.0

    epsilon: Epsilon
    num_groups: Annotated[int, Field(gt=0, le=4096)]


class ClassCountsStatistic(Model):
    """A histogram over classes and public groups, by discrete Laplace noise; for priors given a class.

    Attributes:
        epsilon: what the histogram costs.
        num_classes: classes of the histogram, as many as the condition has.
    """

    delta: ClassVar[float] = 0.0

    epsilon: Epsilon
    num_classes: Annotated[int, Field(gt=1, le=4096)]


class SketchStatistic(Model):
    """One noised sketch per unit, by the Gaussian mechanism at t_release, of the projection's leading dimensions.

    Attributes:
        epsilon: what the sketches cost; t_release follows from it.
        delta: what they cost.
        rank: dimensions of the sketches, at most those of the public projection.
    """

    epsilon: Epsilon
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]
    rank: Annotated[int, Field(gt=0, le=1024)]


StatisticTerms = CountsStatistic | ClassCountsStatistic | SketchStatistic


class Statistics(Model):
    """The differentially private statistics of a plan, and their total privacy budget.

    `ddm.statistics.cost` composes their joint cost; here each statistic only has to fit the total by itself.

    Attributes:
        unit: the unit whose record one replacement exchanges.
        relation: how neighbouring data sets differ: replace_one, one unit's record is replaced; none for the plan of
            one owner's islands, whose counts are exact and hide nothing from anybody (`EXACT`).
    """

    unit: Unit
    relation: Literal["replace_one", "none"] = "replace_one"
    total: Budget
    counts: CountsStatistic
    class_counts: ClassCountsStatistic | None = None
    sketch: SketchStatistic | None = None

    @property
    def terms(self) -> Mapping[StatisticKind, StatisticTerms]:
        """The terms of each statistic that the plan requires, by kind, in the order in which they are drawn."""
        terms: dict[StatisticKind, StatisticTerms] = {"counts": self.counts}
        if self.class_counts is not None:
            terms["class_counts"] = self.class_counts
        if self.sketch is not None:
            terms["sketch"] = self.sketch
        return terms

    @property
    def private(self) -> bool:
        """Whether the statistics carry noise; without it they are one owner's, and never leave them."""
        return self.relation != "none"

    @model_validator(mode="after")
    def _total_covers_each_statistic(self) -> "Statistics":
        epsilon = max(terms.epsilon for terms in self.terms.values())
        if epsilon > self.total.epsilon:
            raise ValueError(
                f"a statistic has epsilon {epsilon:g}, more than the total of {self.total.epsilon:g}"
            )
        delta = max(terms.delta for terms in self.terms.values())
        if delta > self.total.delta:
            raise ValueError(
                f"a statistic has delta {delta:g}, more than the total of {self.total.delta:g}"
            )
        return self

    @model_validator(mode="after")
    def _exact_counts_promise_nothing(self) -> "Statistics":
        if self.private:
            return self
        # Any smaller epsilon would be a promise that nobody keeps, since these counts have no noise.
        epsilons = {terms.epsilon for terms in self.terms.values()}
        is_gaussian = any(terms.delta > 0 for terms in self.terms.values())
        if epsilons | {self.total.epsilon} != {EXACT} or is_gaussian or self.unit != "image":
            raise ValueError(
                f'the relation "none" takes counts of images alone, with epsilon {EXACT:g}'
            )
        return self


class SubmittedStatistic(Model):
    """What a submission states of one statistic: its cost, which is the plan's, and the digest of its file."""

    kind: StatisticKind
    epsilon: Epsilon
    delta: Delta
    file: File
