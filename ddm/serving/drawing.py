"""Turns requests into calls of `Ensemble.sample`, and its samples into files."""

# Shape legend: N samples.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ddm.diffusion.solver import SolverName
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import MathError, SetupError
from ddm.io.pictures import check_pictures, encode_samples
from ddm.loading.release import Release
from ddm.protocol.architecture import ClassCondition, TextCondition, learns_null
from ddm.sampling.guidance import ConditionValue, by_number, condition_and_null, knows_shares
from ddm.sampling.samples import Samples
from ddm.sampling.silo_weights import weights_of_experts
from ddm.sampling.strategies import Strategy, strategy_named
from ddm.serving.requests import DEFAULT_STEPS, Format, SampleRequest, ServiceLimits

if TYPE_CHECKING:
    from ddm.encoders.text import TextEncoder


class AbandonedError(Exception):
    """Nobody waits for these samples any more."""


@dataclass(frozen=True)
class CallSettings:
    """What all requests of one call of the sampler have in common.

    Attributes:
        strategy: which experts samples follow.
        steps: of the solver.
        solver: its name.
        prior: the weight of each expert.
        has_class: whether samples have a class, which may differ among them.
        text: the prompt of all samples.
        guidance: g.
    """

    strategy: Strategy
    steps: int
    solver: SolverName
    prior: tuple[float, ...]
    has_class: bool
    text: str | None
    guidance: float


@dataclass(frozen=True)
class SampleJob:
    """One request, checked against the release.

    Attributes:
        settings: see `CallSettings`.
        num: how many images.
        seed: of all of them.
        first: the number of the first one.
        label: their class.
        format: of the answer.
    """

    settings: CallSettings
    num: int
    seed: int
    first: int
    label: int | None
    format: Format


class ReleaseSampler:
    """Draws samples of one release.

    Args:
        release: verified.
        ensemble: of the release.
        text_encoder: the one that the plan pins; None where the operator gave none.
    """

    def __init__(
        self, release: Release, ensemble: Ensemble, text_encoder: "TextEncoder | None" = None
    ) -> None:
        self._release = release
        self._ensemble = ensemble
        self._text_encoder = text_encoder

    def job_of(
        self, request: SampleRequest, image_format: Format, limits: ServiceLimits
    ) -> SampleJob:
        """Check a request against the release; nothing is drawn yet.

        Raises:
            MathError: settings that do not go together, or that the release does not have.
            SetupError: images that are no pictures, as PNG.
        """
        settings = {
            "tau": request.tau,
            "prefix": request.prefix,
            "k": request.top_k,
            "mass": request.mass,
            "least": request.least,
        }
        experts = self._release.manifest.experts
        prior = weights_of_experts(
            request.prior,
            [expert.silo_id for expert in experts],
            [expert.prior for expert in experts],
        )
        label = self._check_condition(request)
        if image_format == "png":
            check_pictures(self._release.plan.data.shape)
        return SampleJob(
            settings=CallSettings(
                strategy=strategy_named(request.strategy, **settings),
                steps=request.steps or min(DEFAULT_STEPS, limits.steps),
                solver=request.solver,
                prior=tuple(prior),
                has_class=label is not None,
                text=request.text,
                guidance=request.guidance,
            ),
            num=request.num,
            seed=request.seed,
            first=request.first,
            label=label,
            format=image_format,
        )

    def _check_condition(self, request: SampleRequest) -> int | None:
        """Return the number of the class, None without one."""
        condition = self._ensemble.condition
        if request.label is not None and request.text is not None:
            raise MathError("condition", expected="a class or a text", got="a class and a text")
        has_condition = request.label is not None or request.text is not None
        if request.guidance and not has_condition:
            raise MathError("guidance", expected="a class or a text as well", got="no condition")
        # Such experts never learned to answer without a condition, which guidance asks of them too.
        if not learns_null(condition) and (request.guidance or not has_condition):
            raise MathError(
                "condition",
                expected=f"a {condition.kind}, and no guidance",
                got="experts that always had a condition in training",
            )
        if request.text is not None:
            if not isinstance(condition, TextCondition) or self._text_encoder is None:
                expected = "experts with texts, and a server that was started with --text-encoder"
                raise MathError("text", expected=expected, got="a server without")
            return None
        if request.label is None:
            return None
        if not isinstance(condition, ClassCondition):
            raise MathError("class", expected="experts with classes", got="experts without")
        number = by_number(condition, request.label)
        condition_and_null(condition, number)
        return int(number)

    def draw(self, jobs: Sequence[SampleJob], is_wanted: Callable[[], bool]) -> list[bytes]:
        """Draw the samples of some jobs in one call; see `ddm.serving.queue.Draw`.

        Raises:
            AbandonedError: nobody waits any more.
            MathError: this release cannot draw such samples.
            Exception: whatever the sampler raises.
        """
        settings = jobs[0].settings

        def check_wanted(num_taken: int, num_steps: int) -> None:
            if not is_wanted():
                raise AbandonedError

        condition = self._condition(jobs)
        condition_prior = None
        if settings.text is not None and not knows_shares(self._ensemble.router):
            # As in `ddm sample`: no release counts texts.
            condition_prior = self._ensemble.prior
        samples = self._ensemble.sample(
            sum(job.num for job in jobs),
            strategy=settings.strategy,
            steps=settings.steps,
            condition=condition,
            guidance=settings.guidance,
            prior=settings.prior,
            progress=False,
            options=SamplingOptions(
                solver=settings.solver,
                condition_prior=condition_prior,
                seeds=list(chain.from_iterable([job.seed] * job.num for job in jobs)),
                numbers=list(
                    chain.from_iterable(range(job.first, job.first + job.num) for job in jobs)
                ),
                on_progress=check_wanted,
            ),
        )
        return [encode(own_samples, job.format) for job, own_samples in _divided(jobs, samples)]

    def _condition(self, jobs: Sequence[SampleJob]) -> ConditionValue | None:
        """Return the condition of all samples, or a class for each of them."""
        settings = jobs[0].settings
        if settings.text is not None and self._text_encoder is not None:
            return self._encode_text(settings.text, self._text_encoder)
        if not settings.has_class:
            return None
        labels = [job.label for job in jobs for _ in range(job.num)]
        if len(set(labels)) == 1:
            return labels[0]
        return torch.tensor(labels, dtype=torch.int64)

    def _encode_text(self, text: str, encoder: "TextEncoder") -> torch.Tensor:
        try:
            vectors = encoder.encode([text])[0]
        except SetupError as error:
            raise MathError("text", expected=error.expected, got=error.got) from error
        # All zeros is the null condition: the samples would silently have none.
        if not vectors.any():
            raise MathError(
                "text", expected="a word that the encoder knows", got="a text without one"
            )
        return vectors


def encode(samples: Samples, image_format: Format) -> bytes:
    """Return samples as a file, as `ddm sample` writes it."""
    return encode_samples(
        samples.images,
        samples.expert_N.tolist(),
        f".{image_format}",
        samples.release,
        samples.classes,
        samples.value_range,
    )


def _divided(jobs: Sequence[SampleJob], samples: Samples) -> Iterator[tuple[SampleJob, Samples]]:
    first = 0
    for job in jobs:
        yield job, samples[first : first + job.num]
        first += job.num


def describe_release(release: Release, ensemble: Ensemble) -> dict[str, Any]:
    """Return what a client may want to know of the release, for JSON."""
    plan = release.plan
    manifest = release.manifest
    condition = plan.condition
    classes = []
    if isinstance(condition, ClassCondition):
        classes = [condition.classes.name(number) for number in range(condition.num_classes)]
    return {
        "plan_id": manifest.plan_id,
        "version": manifest.version,
        "manifest_digest": release.manifest_digest,
        "published_at": manifest.published_at.isoformat(),
        "timestamp_valid_until": release.verified.expires.isoformat(),
        "rehearsal": plan.rehearsal,
        "licence": manifest.licence,
        "shape": list(plan.data.shape),
        "range": list(plan.data.range),
        "condition": condition.kind,
        "classes": classes,
        "router": manifest.router.kind,
        "experts": list(ensemble.expert_ids),
        "silos": manifest.silo_priors(),
        "expert_bytes": sum(expert.file.bytes for expert in manifest.experts),
    }
