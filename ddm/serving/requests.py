"""The request for samples: a strict model, parsed from a bounded body, with the limits of this server."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ddm.diffusion.solver import SolverName
from ddm.errors import DocumentError
from ddm.io.pictures import CELL_PIXELS, GAP_PIXELS
from ddm.protocol.base import Model, NaturalInt, SiloId, check_json, describe_error
from ddm.sampling.strategies import STRATEGIES

MAX_BODY_BYTES = 1 << 16
MAX_TEXT = 4096
_FLOAT_BYTES = 4
_PIXEL_BYTES = 3
_MAX_GUIDANCE = 1000.0
_MAX_STEPS = 10_000
_MAX_WEIGHT = 1e9
DEFAULT_STEPS = 25
PNG = "image/png"
NPZ = "application/x-npz"
MEDIA_TYPES: dict[str, str] = {"png": PNG, "npz": NPZ}

Format = Literal["png", "npz"]
Weight = Annotated[float, Field(ge=0, le=_MAX_WEIGHT)]


@dataclass(frozen=True)
class ServiceLimits:
    """What this server takes.

    Attributes:
        images: most images of one request, and of one call of the sampler.
        steps: most solver steps of one request.
        requests: most requests that wait or are answered at a time.
    """

    images: int
    steps: int
    requests: int


class SampleRequest(Model):
    """What a client asks for; the names are those of the options of `ddm sample`."""

    num: int = Field(1, ge=1, description="Number of images.")
    seed: NaturalInt = Field(
        0, description="Random seed; the same request to the same release gives the same images."
    )
    first: NaturalInt = Field(
        0,
        description="Number of the first image: those of one seed are numbered from 0, so that 64 further images of a "
        "seed begin at 64.",
    )
    steps: Annotated[int, Field(ge=1, le=_MAX_STEPS)] | None = Field(
        None,
        description=f"Number of solver steps (default: {DEFAULT_STEPS}, or the server's most).",
    )
    solver: SolverName = Field("midpoint", description="ODE solver.")
    strategy: str = Field(
        "lock",
        max_length=40,
        description="Which experts an image follows.",
        json_schema_extra={"enum": list(STRATEGIES)},
    )
    tau: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="lock: the time from which an image keeps its expert (default: 1)."
    )
    prefix: Literal["sample", "full"] | None = Field(
        None, description="lock with tau below 1: what an image follows before (default: sample)."
    )
    top_k: Annotated[int, Field(ge=1, le=_MAX_STEPS)] | None = Field(
        None, description="top-k: the maximum number of experts that are mixed (default: 2)."
    )
    mass: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="nucleus: the probability that the mixed experts have together."
    )
    least: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="threshold: the probability that each mixed expert has at least."
    )
    prior: Literal["data", "equal"] | dict[SiloId, Weight] = Field(
        "data",
        description='Weights of the silos: data, equal, or an object such as {"north": 1}; a silo that is not named '
        "is left out.",
    )
    label: Annotated[str, Field(max_length=200)] | NaturalInt | None = Field(
        None, alias="class", description="The class of all images, by name or number."
    )
    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)] | None = Field(
        None, description="The text prompt for all images."
    )
    guidance: float = Field(
        0.0, ge=0, le=_MAX_GUIDANCE, description="Guidance scale, with a class or a text."
    )
    format: Format | None = Field(
        None, description="png (a grid) or npz (default: by the header Accept, else png)."
    )


def parse_request(body: bytes, limits: ServiceLimits) -> SampleRequest:
    """Parse a body, or refuse it.

    Raises:
        DocumentError: it is no JSON, not of the schema, or larger than this server's limits.
    """
    # pydantic's own parser takes NaN, any depth, and the last of two fields of one name.
    check_json(body, subject="the request", limit=MAX_BODY_BYTES)
    try:
        request = SampleRequest.model_validate_json(body)
    except ValidationError as error:
        field, fault = describe_error(SampleRequest, error)
        # A name that no request has is the sender's text, which is not repeated.
        if field == "document":
            expected = "an object with the fields that /docs lists"
            got = "another field, or no object"
            raise DocumentError("the request", expected=expected, got=got) from error
        expected = fault.removeprefix("Input should be ")
        if expected.startswith(("greater", "less")):
            expected = f"a number {expected}"
        raise DocumentError(
            f"the request, field {field}", expected=expected, got="another value"
        ) from error
    _check_limit("num", request.num, limits.images)
    _check_limit("steps", request.steps or 1, limits.steps)
    return request


def answer_bytes(shape: Sequence[int], num: int) -> int:
    """Return the bytes of the largest answer: images in float32, or in a grid that enlarges small ones."""
    cell_side = CELL_PIXELS + GAP_PIXELS + max(shape[-2:])
    return num * max(_FLOAT_BYTES * prod(shape), _PIXEL_BYTES * cell_side**2)


def _check_limit(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise DocumentError(
            f"the request, field {field}", expected=f"at most {limit}", got=f"{value}"
        )


def request_schema(limits: ServiceLimits) -> dict[str, Any]:
    """Return the JSON schema of a request, with this server's limits."""
    schema = SampleRequest.model_json_schema()
    fields = schema["properties"]
    fields["num"]["maximum"] = limits.images
    for option in fields["steps"]["anyOf"]:
        if option["type"] == "integer":
            option["maximum"] = limits.steps
    return schema
