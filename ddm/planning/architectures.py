"""Expands the sizes that a recipe names into the numbers that a plan holds."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from ddm.errors import ShapeError
from ddm.planning.training import TrainingRecipe
from ddm.protocol.architecture import Architecture, Dit, ExpertArchitecture
from ddm.protocol.learning import BASE_PATH, Expert, FullAdaptation
from ddm.protocol.routers import PlainSettings, SamplesSettings

SizeName = Annotated[str, Field(max_length=40)]


class SamplesRecipe(SamplesSettings):
    """A transformer on x_t, the paper's router, trained on labelled public images or on images that the experts draw.

    Trained on images of the experts it is as private as their weights; labels of public images cost no privacy.

    Attributes:
        size: a published size, as in `"B/2"`, the paper's, in place of patch, hidden, depth, heads.
    """

    size: SizeName | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, table: Any) -> Any:
        return _expand_size(table, Dit)

    def plain(self) -> SamplesSettings:
        """Return what a plan says about it."""
        return SamplesSettings.model_construct(
            **{name: getattr(self, name) for name in SamplesSettings.model_fields}
        )


RouterRecipe = Annotated[
    PlainSettings | Annotated[SamplesRecipe, AfterValidator(SamplesRecipe.plain)],
    Field(discriminator="kind"),
]


def _expand_architecture(table: Any) -> Any:
    """Replace the name of a published size in a table `expert.architecture` by its numbers."""
    if not isinstance(table, Mapping):
        return table
    # A strict document takes tuples for arrays; those of a file arrive here as lists.
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    union, _ = get_args(Architecture)
    for document in get_args(union):
        if fields.get("kind") == document.model_fields["kind"].default:
            return _expand_size(fields, document)
    # The union refuses it, and says which kinds there are.
    return fields


def _expand_size(table: Any, document: type[ExpertArchitecture]) -> Any:
    if not isinstance(table, Mapping) or table.get("size") is None:
        return table
    if not isinstance(table["size"], str):
        raise ValueError(f"size must be a string, got {table['size']!r}")
    try:
        published = document.published_size(table["size"])
    except ShapeError as error:
        raise ValueError(f"size must be {error.expected}, got {error.got}") from error
    # Only the numbers that the size sets; a table may still set the fields that it leaves at their defaults.
    numbers = published.model_dump(exclude={"kind"}, exclude_unset=True)
    repeated = [name for name in numbers if name in table]
    if repeated:
        raise ValueError(
            f"size stands in place of {', '.join(numbers)}; leave out {', '.join(repeated)}"
        )
    others = {name: value for name, value in table.items() if name != "size"}
    return {**others, **numbers}


class ExpertRecipe(Expert):
    """The recipe of every expert."""

    training: SerializeAsAny[TrainingRecipe]
    architecture: Annotated[Architecture, BeforeValidator(_expand_architecture)]

    def plain(self, *, has_base: bool = False, has_seed: bool = False) -> Expert:
        """Return what a plan says about it.

        Args:
            has_base: whether training starts from a base; without an adaptation, all weights are trained from it.
            has_seed: whether that base is a seed, which is trained by the same recipe.
        """
        values = {name: getattr(self, name) for name in Expert.model_fields}
        if has_base and self.adaptation == FullAdaptation():
            values["adaptation"] = FullAdaptation(base=BASE_PATH)
        starts_full = has_base and isinstance(self.adaptation, FullAdaptation)
        values["training"] = self.training.plain(
            self.architecture, starts_from_base=starts_full, has_seed=has_seed
        )
        return Expert.model_construct(**values)
