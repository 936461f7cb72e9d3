"""The rare settings of a command: one `--set NAME=VALUE` each, checked against a model of names and ranges."""

from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddm.cli.options import HOW
from ddm.errors import SetupError

Positive = Annotated[int, Field(ge=1)]
BATCH = "maximum number of images in one evaluation of an expert, 1 or more; default 64"


class RareSettings(BaseModel):
    """What `--set` of one command may name; a field's description says what its value means."""

    model_config = ConfigDict(
        # Names have hyphens on the command line, and underscores as fields.
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
    )

    @classmethod
    def names(cls) -> dict[str, str]:
        """Return every name with the meaning of its value."""
        return {str(field.alias): str(field.description) for field in cls.model_fields.values()}


class DrawingSettings(RareSettings):
    """The rare settings of `ddm evaluate`, which `ddm sample` has too."""

    mass: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="nucleus: the probability that the mixed experts have together, above 0, at most 1",
    )
    least: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="threshold: the probability that each mixed expert has at least, 0 to 1"
    )
    router_every: Positive | None = Field(
        None, description="ask the router at every N-th step, 1 or more"
    )
    class_prior: str = Field(
        "data", description="who holds the class or the text: data, equal, or ID=W,..."
    )
    guidance_interval: str | None = Field(
        None, description="guide between these times alone: LOW,HIGH within 0 to 1"
    )
    batch: Positive = Field(64, description=BATCH)


class SampleSettings(DrawingSettings):
    """The rare settings of `ddm sample`."""

    corrections: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        None,
        description="inpainting: evaluations that fit the unknown part after each step, 0 to 1,000; default 9",
    )


class SampleStudentSettings(RareSettings):
    """The rare settings of `ddm sample-student`."""

    batch: Positive = Field(64, description=BATCH)


SettingsT = TypeVar("SettingsT", bound=RareSettings)


def set_option(kind: type[RareSettings]) -> Any:
    """Return the option `--set` of a command, which names its settings in the help."""
    text = f"A rare setting, repeatable: {', '.join(kind.names())}."
    return typer.Option("--set", metavar="NAME=VALUE", help=text, rich_help_panel=HOW)


def read_settings(kind: type[SettingsT], words: list[str] | None) -> SettingsT:
    """Read the values of `--set`.

    Raises:
        SetupError: not NAME=VALUE, a name that does not exist or comes twice, or a value out of range.
    """
    names = kind.names()
    values: dict[str, str] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            raise SetupError(
                "--set", expected=f"NAME=VALUE, NAME one of {', '.join(names)}", got=repr(word[:60])
            )
        # The later one would win silently.
        if name in values:
            raise SetupError(
                f"--set {name}",
                expected="the name once",
                got=f"{values[name][:40]!r} and {value[:40]!r}",
            )
        values[name] = value
    try:
        # All values are text here; pydantic reads numbers from it by the fields' types.
        return kind.model_validate_strings(values)
    except ValidationError as error:
        # The first problem is enough; its description says what is allowed.
        name = str(error.errors()[0]["loc"][0])
        raise SetupError(
            f"--set {name}", expected=names[name], got=repr(values[name][:60])
        ) from error
