"""The recipe of `ddm split`: the TOML of `aggregator plan`, without what only a federation needs."""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from ddm.io.settings import Settings
from ddm.islands.seed import num_seed_steps
from ddm.planning.recipe import ReleaseBaseRecipe, SeedBaseRecipe, SharedRecipe
from ddm.protocol.base import Licence, ShortText
from ddm.protocol.learning import FullAdaptation, OwnAdaptation
from ddm.protocol.limits import Audit, SubmissionLimits
from ddm.protocol.statistics import Statistics

_DEFAULT_GROUPS = 128


class OwnerRecipe(Settings):
    """What a federation has elsewhere: a name, terms of publication, and how the clusters are fitted.

    Attributes:
        name: what the releases are called.
        licence: the licence of the releases.
        cite: how to cite them.
        fit_images: the maximum number of images, drawn at random, to fit encoder, clusters, sketch and router on.
        num_groups: groups of fine centroids that the router distinguishes; by default 128, or as `[statistics]` states.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,40}$")] = "islands"
    licence: Licence = "CC-BY-4.0"
    cite: ShortText = "McAllister et al., Decentralized Diffusion Models, CVPR 2025"
    fit_images: Annotated[int, Field(gt=0, le=10**7)] = 40_000
    num_groups: Annotated[int, Field(gt=0, le=4096)] | None = None


class IslandsRecipe(SharedRecipe):
    """One TOML file: how one owner's data set is divided, and how each island's expert is trained.

    A federation's recipe is one too: its statistics, audit and limits are not used, since nothing leaves the owner.

    Attributes:
        base: the public expert that training starts from, whichever weights `expert.adaptation` then trains; the
            adaptations lora and partial need one.
        valid_days: not used; a plan of islands is valid as long as its signatures.
    """

    owner: OwnerRecipe = OwnerRecipe()
    valid_days: int | None = None
    statistics: Statistics | None = None
    audit: Audit | None = None
    limits: SubmissionLimits | None = None

    @property
    def num_groups(self) -> int:
        """The number of groups of fine centroids that the router distinguishes."""
        if self.owner.num_groups:
            return self.owner.num_groups
        if self.statistics:
            return self.statistics.counts.num_groups
        return min(_DEFAULT_GROUPS, self.clustering.num_fine or _DEFAULT_GROUPS)

    @property
    def released_rank(self) -> int:
        """The dimensions of the sketch that its scale is fitted in: all, since none is released."""
        return self.sketch.rank

    @property
    def not_used(self) -> tuple[str, ...]:
        """The tables of a federation's recipe that this one contains."""
        return tuple(
            name for name in ("statistics", "audit", "limits") if getattr(self, name) is not None
        )

    @model_validator(mode="after")
    def _released_base_is_one_expert(self) -> "IslandsRecipe":
        if not isinstance(self.base, ReleaseBaseRecipe):
            return self
        # There is no folder of a federation whose root would be pinned, and experts are not compared here.
        if self.base.root is None or self.base.expert is None:
            raise ValueError(
                "base.kind release needs root, the 1.root.json by which the release is verified, and expert, the name "
                "of one of its experts (ddm info lists them); for a student use the kind file"
            )
        return self

    @model_validator(mode="after")
    def _seed_and_islands_train(self) -> "IslandsRecipe":
        if not isinstance(self.base, SeedBaseRecipe):
            return self
        # Less would be trained than the budget pays for, and what a part of the weights needs was not tried.
        if not isinstance(self.expert.adaptation, FullAdaptation):
            raise ValueError(
                "islands that start from a seed train all weights: leave [expert.adaptation] out"
            )
        num_steps = self.expert.training.num_steps
        if not 0 < num_seed_steps(num_steps, self.base.share) < num_steps:
            raise ValueError(
                "base.share (--seed-share) must leave steps to both the seed and the islands, got "
                f"{self.base.share:g} of expert.training.num_steps = {num_steps}"
            )
        return self

    @model_validator(mode="after")
    def _no_earlier_plan(self) -> "IslandsRecipe":
        # There is no earlier plan of islands: `ddm split` makes a new folder each time.
        if isinstance(self.expert.adaptation, OwnAdaptation):
            raise ValueError(
                "expert.adaptation.kind own needs a federation's earlier plan: use full, lora or partial"
            )
        return self
