"""Expands the sizes that a recipe names into the numbers that a plan holds."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, model_validator

from ddm.errors import ShapeError
from ddm.planning.training import TrainingRecipe
from ddm.protocol.architecture import Dit, Mmdit, TransformerSize, Unet, dit_size, mmdit_size
from ddm.protocol.learning import Expert
from ddm.protocol.routers import CountsRouter, LearnedRouter, SamplesRouter

SizeName = Annotated[str, Field(max_length=40)]
_SIZE_FIELDS = {"patch", "hidden", "depth", "heads", "shared_depth"}


class DitRecipe(Dit):
    """A diffusion transformer with adaLN-zero blocks (Peebles and Xie 2023); a text enters by cross-attention.

    Attributes:
        size: a published size, S, B, L or XL with the patch, as in `"XL/2"`, in place of patch, hidden, depth, heads.
    """

    size: SizeName | None = None

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, given: Any) -> Any:
        return _expanded(given, dit_size)

    def plain(self) -> Dit:
        """Return what a plan says of it."""
        return Dit.model_construct(**{name: getattr(self, name) for name in Dit.model_fields})


class MmditRecipe(Mmdit):
    """Joint attention over text and image tokens (Esser et al. 2024).

    Attributes:
        size: a published size, d15, d18, d21, d24, d30, d38 or 3B with the patch, as in `"d24/2"`, in place of patch,
            hidden, depth, heads and shared_depth.
    """

    size: SizeName | None = None

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, given: Any) -> Any:
        return _expanded(given, mmdit_size)

    def plain(self) -> Mmdit:
        """Return what a plan says of it."""
        return Mmdit.model_construct(**{name: getattr(self, name) for name in Mmdit.model_fields})


class SamplesRecipe(SamplesRouter):
    """A transformer on x_t, the paper's router, trained on labelled public images or on images that the experts draw.

    Trained on images of the experts it is as private as their weights; labels of public images cost no privacy.

    Attributes:
        size: a published size, as in `"B/2"`, the paper's, in place of patch, hidden, depth, heads.
    """

    size: SizeName | None = None

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, given: Any) -> Any:
        return _expanded(given, dit_size)

    def plain(self) -> SamplesRouter:
        """Return what a plan says of it."""
        return SamplesRouter.model_construct(
            **{name: getattr(self, name) for name in SamplesRouter.model_fields}
        )


RouterRecipe = Annotated[
    LearnedRouter | CountsRouter | Annotated[SamplesRecipe, AfterValidator(SamplesRecipe.plain)],
    Field(discriminator="kind"),
]


class ExpertRecipe(Expert):
    """The recipe of every expert."""

    training: SerializeAsAny[TrainingRecipe]

    architecture: Annotated[
        Annotated[DitRecipe, AfterValidator(DitRecipe.plain)]
        | Annotated[MmditRecipe, AfterValidator(MmditRecipe.plain)]
        | Unet,
        Field(discriminator="kind"),
    ]

    def plain(self) -> Expert:
        """Return what a plan says of it."""
        values = {name: getattr(self, name) for name in Expert.model_fields}
        return Expert.model_construct(
            **values | {"training": self.training.plain(self.architecture)}
        )


def _expanded(given: Any, named: Callable[[str], TransformerSize]) -> Any:
    """Replace a size's name by its numbers, among which none may be given beside it."""
    if not isinstance(given, Mapping) or not isinstance(given.get("size"), str):
        return given
    try:
        numbers = named(given["size"]).model_dump(include=_SIZE_FIELDS)
    except ShapeError as error:
        raise ValueError(f"size must be {error.expected}, got {error.got}") from error
    if both := [name for name in numbers if name in given]:
        raise ValueError(
            f"size stands in place of {', '.join(numbers)}; leave out {', '.join(both)}"
        )
    return {**given, **numbers}
