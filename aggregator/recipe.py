"""The recipe: what an operator writes to ask for a plan. The rest of the plan is fitted, counted or signed."""

from typing import Annotated

from pydantic import Field

from ddm.protocol.base import PositiveInt
from ddm.protocol.plan import (
    Audit,
    CountsRouter,
    DataSpec,
    Expert,
    LearnedRouter,
    Limits,
    LogitNormalT,
    Releases,
    SiloPartition,
    UniformT,
)
from ddm.settings import Settings


class EncoderRecipe(Settings):
    """Principal components of the public images."""

    dim: Annotated[int, Field(gt=0, le=4096)]


class ClusteringRecipe(Settings):
    """How many fine centroids and coarse clusters."""

    num_fine: Annotated[int, Field(gt=0, le=65536)]
    num_coarse: Annotated[int, Field(gt=0, le=4096)]


class PublicRecipe(Settings):
    """How the public images are used: a part is held out to judge the routers."""

    holdout_share: Annotated[float, Field(gt=0.0, lt=0.9)] = 0.25
    seed: Annotated[int, Field(ge=0)] = 0


class Recipe(Settings):
    """One TOML file: the parts of a plan that an operator chooses."""

    valid_days: PositiveInt = 90
    public: PublicRecipe = PublicRecipe()
    data: DataSpec
    encoder: EncoderRecipe
    clustering: ClusteringRecipe
    partition: SiloPartition
    t_distribution: Annotated[UniformT | LogitNormalT, Field(discriminator="kind")] = UniformT()
    expert: Expert
    releases: Releases
    router: Annotated[LearnedRouter | CountsRouter, Field(discriminator="kind")]
    audit: Audit
    limits: Limits
