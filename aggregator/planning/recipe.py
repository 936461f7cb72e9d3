"""The recipe: what an operator writes to ask for a plan. The rest of the plan is fitted, counted or signed."""

from typing import Annotated

from pydantic import Field, model_validator

from ddm.planning.recipe import SeedBaseRecipe, SharedRecipe
from ddm.protocol.plan import PlanTerms
from ddm.protocol.routers import SamplesSettings


class Recipe(SharedRecipe, PlanTerms):
    """One TOML file: the parts of a plan that an operator chooses.

    Attributes:
        valid_days: days until the plan expires; the timestamp that silos receive is valid for at most 90.
        base: the public expert that training starts from, whichever weights `expert.adaptation` then trains; the
            adaptations lora and partial need one.
    """

    valid_days: Annotated[int, Field(gt=0, le=90)] = 90

    @property
    def num_groups(self) -> int:
        """The number of groups of fine centroids that silos count their images in."""
        return self.statistics.counts.num_groups

    @property
    def released_rank(self) -> int:
        """The dimensions of the widest sketch that leaves a silo."""
        # Where no sketch leaves a silo, the scale is fitted in all dimensions.
        if self.statistics.sketch is None:
            return self.sketch.rank
        return self.statistics.sketch.rank

    @model_validator(mode="after")
    def _transform_fits_the_unit(self) -> "Recipe":
        if self.transform and (misfit := self.transform.misfit(self.data, self.statistics.unit)):
            raise ValueError(f"the transform needs {misfit}")
        return self

    @model_validator(mode="after")
    def _base_is_no_seed(self) -> "Recipe":
        # It is trained on all images, and no federation has them in one place.
        if isinstance(self.base, SeedBaseRecipe):
            raise ValueError(
                "base.kind seed is for ddm split: use file, diffusers, trained or release"
            )
        return self

    @model_validator(mode="after")
    def _statistics_are_private(self) -> "Recipe":
        if not self.statistics.private:
            raise ValueError(
                'statistics.relation must be "replace_one": a silo releases nothing without noise'
            )
        return self

    @model_validator(mode="after")
    def _router_is_labelled(self) -> "Recipe":
        router = self.router
        if (
            isinstance(router, SamplesSettings)
            and router.labels == "class"
            and self.statistics.class_counts is None
        ):
            raise ValueError(
                'router.labels "class" needs the statistic class_counts, which says who holds a class'
            )
        return self
