"""Requests drawn together are what the library draws of each alone; what does not fit the release is refused before."""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from ddm.ensemble import ClassPrior, Ensemble
from ddm.errors import ArchipelagoError, DocumentError, MathError
from ddm.loading.ensemble import load_ensemble
from ddm.loading.release import Release
from ddm.protocol.architecture import ClassCondition
from ddm.sampling.silo_weights import weights_of_experts
from ddm.serving.drawing import ReleaseSampler, SampleJob
from ddm.serving.requests import (
    MAX_BODY_BYTES,
    SampleRequest,
    ServiceLimits,
    parse_request,
    request_schema,
)
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.publishing import verify_release

LIMITS = ServiceLimits(images=16, steps=50, requests=4)
# Float32 sums of experts depend on how many samples are evaluated at once.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def release(published_once: PublishedRelease) -> Release:
    return verify_release(published_once, published_once.release)


@pytest.fixture(scope="module")
def ensemble(release: Release) -> Ensemble:
    return load_ensemble(release)


def read(body: str, limits: ServiceLimits = LIMITS) -> SampleRequest:
    return parse_request(body.encode(), limits)


def jobs_of(sampler: ReleaseSampler, *bodies: str) -> list[SampleJob]:
    return [sampler.job_of(read(body), "npz", LIMITS) for body in bodies]


def arrays(content: bytes) -> dict[str, np.ndarray]:
    with np.load(BytesIO(content)) as file:
        return {name: np.asarray(file[name]) for name in file.files}


def drawn(ensemble: Ensemble, sampler: ReleaseSampler, *bodies: str) -> list[dict[str, Any]]:
    """Draw requests in one call."""
    contents = sampler.draw(jobs_of(sampler, *bodies), lambda: True)
    return [arrays(content) for content in contents]


TOGETHER = (
    '{"num": 3, "seed": 7, "steps": 4, "strategy": "%s"}',
    '{"num": 1, "seed": 7, "first": 3, "steps": 4, "strategy": "%s"}',
    '{"num": 2, "seed": 9, "steps": 4, "strategy": "%s"}',
)


@pytest.mark.parametrize("strategy", ["lock", "sample", "full", "nucleus"])
def test_requests_in_one_call_have_the_bytes_of_the_library_with_chunks_of_one_and_its_values_with_others(
    release: Release, ensemble: Ensemble, strategy: str
) -> None:
    bodies = [body % strategy for body in TOGETHER]
    for chunk_size, tolerance in ((1, 0.0), (64, ROUNDING)):
        with case(chunk_size=chunk_size):
            own = replace(ensemble, chunk_size=chunk_size)
            first, second, third = drawn(own, ReleaseSampler(release, own), *bodies)
            seven = own.sample(4, seed=7, steps=4, strategy=strategy)
            nine = own.sample(2, seed=9, steps=4, strategy=strategy)
            images = np.concatenate([first["images"], second["images"]])
            low, high = release.plan.data.range
            expected = seven.images.clamp(low, high).numpy()
            np.testing.assert_allclose(images, expected, rtol=0, atol=tolerance)
            np.testing.assert_allclose(
                third["images"], nine.images.clamp(low, high).numpy(), rtol=0, atol=tolerance
            )
            assert first["expert"].tolist() == seven.expert_N[:3].tolist()
            assert first["release"] == release.manifest_digest and first["synthetic"]
            # The control: another seed draws other images.
            assert np.abs(first["images"][:2] - third["images"]).max() > 100 * ROUNDING


def ensemble_of_classes(ensemble: Ensemble) -> Ensemble:
    """Experts whose data are all at one value: that of their class and their own number."""

    def expert_at(number: int) -> Any:
        def velocity(x_B: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
            value_B = 0.1 * label_B + 0.01 * number
            return (x_B - value_B[:, None, None, None]) / t_B.clamp(min=1e-3)[:, None, None, None]

        return velocity

    num_experts = len(ensemble.experts)

    def prior_of(label: int) -> ClassPrior:
        # The data of class 2 are all of the first expert.
        return ClassPrior([1.0] + [0.0 if label == 2 else 1.0] * (num_experts - 1))

    return replace(
        ensemble,
        experts=[expert_at(number) for number in range(num_experts)],
        condition=ClassCondition(num_classes=5),
        class_prior=prior_of,
    )


def test_requests_of_several_classes_in_one_call_get_images_of_their_own_class(
    release: Release, ensemble: Ensemble
) -> None:
    of_classes = ensemble_of_classes(ensemble)
    sampler = ReleaseSampler(release, of_classes)
    bodies = [
        '{"num": 3, "class": "2"}',
        '{"num": 2, "class": 4, "seed": 5}',
        '{"num": 1, "class": 2, "first": 3}',
    ]
    assert len({job.settings for job in jobs_of(sampler, *bodies)}) == 1
    first, second, third = drawn(of_classes, sampler, *bodies)
    np.testing.assert_allclose(first["images"], 0.2, atol=1e-4)
    np.testing.assert_allclose(third["images"], 0.2, atol=1e-4)
    own = second["images"] - 0.01 * second["expert"][:, None, None, None]
    np.testing.assert_allclose(own, 0.4, atol=1e-4)
    assert first["class"].tolist() == ["2"] * 3 and second["class"].tolist() == ["4"] * 2
    # Without a class the experts get none, so that such a request is never drawn beside these.
    assert jobs_of(sampler, '{"num": 3}')[0].settings != jobs_of(sampler, bodies[0])[0].settings


HOSTILE = [
    "",
    "null",
    "[]",
    "nonsense",
    '{"num": 1',
    '{"num": NaN}',
    '{"guidance": Infinity, "class": 1}',
    '{"guidance": 1e999, "class": 1}',
    '{"num": 0}',
    '{"num": -1}',
    '{"num": 1.5}',
    '{"num": true}',
    '{"num": "1"}',
    '{"num": 17}',
    '{"num": 1e3}',
    '{"num": 100000000000000000000000000000000000000000}',
    '{"num": 1, "num": 2}',
    '{"seed": -1}',
    '{"seed": 18446744073709551616}',
    '{"first": -1}',
    '{"steps": 51}',
    '{"steps": 0}',
    '{"tau": 1.5, "strategy": "lock"}',
    '{"solver": "rk5"}',
    '{"prior": "mine"}',
    '{"prior": {"../x": 1}}',
    '{"prior": {"north": -1}}',
    '{"class": ["a"]}',
    '{"class": ' + "[" * 10_000 + "}",
    '{"text": ""}',
    '{"text": "' + "x" * 5000 + '"}',
    '{"text": "' + "x" * MAX_BODY_BYTES + '"}',
    '{"format": "exe"}',
    '{"batch": 4}',
    '{"\\u0000": 1}',
    '{"prior": {' + ", ".join(f'"s{number}": 1' for number in range(70_000)) + "}}",
    "\ufeff{}",
]


def test_hostile_body_is_refused_in_one_sentence_that_repeats_nothing_of_it() -> None:
    for body in HOSTILE:
        with case(body[:80]), pytest.raises(DocumentError) as refused:
            read(body)
        sentence = str(refused.value)
        assert len(sentence) < 300 and "\n" not in sentence
        assert "mine" not in sentence and "rk5" not in sentence and "exe" not in sentence
    # The control: what is asked for as it should be is taken.
    assert read('{"num": 16, "steps": 50, "prior": {"north": 1}}').num == 16


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"strategy": "full", "tau": 0.5}', "strategy full"),
        ('{"strategy": "best"}', "strategy"),
        ('{"prior": {"nowhere": 1}}', "prior"),
        ('{"prior": {"north": 0}}', "prior"),
        ('{"class": 1}', "class"),
        ('{"text": "a"}', "text"),
        ('{"guidance": 1}', "guidance"),
        ('{"class": 1, "text": "a"}', "condition"),
    ],
)
def test_request_that_does_not_fit_the_release_is_refused_before_it_waits(
    release: Release, ensemble: Ensemble, body: str, words: str
) -> None:
    with pytest.raises(MathError, match=words):
        jobs_of(ReleaseSampler(release, ensemble), body)


@pytest.mark.parametrize("body", ['{"class": 5}', '{"class": "six"}', '{"class": -1}'])
def test_class_that_is_none_is_refused(release: Release, ensemble: Ensemble, body: str) -> None:
    with pytest.raises(ArchipelagoError):
        jobs_of(ReleaseSampler(release, ensemble_of_classes(ensemble)), body)


def test_experts_that_always_had_a_class_draw_nothing_without_one_and_no_guidance(
    release: Release, ensemble: Ensemble
) -> None:
    always = replace(
        ensemble_of_classes(ensemble), condition=ClassCondition(num_classes=5, drop=0.0)
    )
    for body in ('{"num": 1}', '{"class": 1, "guidance": 2}'):
        with case(body), pytest.raises(MathError, match="always"):
            jobs_of(ReleaseSampler(release, always), body)


def test_weight_of_a_silo_goes_to_its_experts_by_their_data() -> None:
    silo_ids = ["east", "north", "east", "south"]
    prior = [0.1, 0.0, 0.3, 0.6]

    def weights(silo_weights: Any) -> Sequence[float]:
        return weights_of_experts(silo_weights, silo_ids, prior)

    assert weights({"east": 3, "south": 1}) == pytest.approx([0.1875, 0.0, 0.5625, 0.25])
    assert weights("data") == prior
    for wrong in ({"north": 1}, {"west": 1}, {"east": -1}, {"east": float("nan")}, {}, "most"):
        with case(wrong), pytest.raises(MathError, match="prior"):
            weights(wrong)


def test_schema_states_the_limits_of_this_server() -> None:
    fields = request_schema(LIMITS)["properties"]
    assert fields["num"]["maximum"] == 16
    assert [option.get("maximum") for option in fields["steps"]["anyOf"]] == [50, None]


def test_page_on_serving_names_exactly_the_fields_of_a_request() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "serve.md"
    table = page.read_text("utf-8").partition("| field |")[2].partition("\n\n")[0]
    named = [line.split("`")[1] for line in table.splitlines()[2:]]
    assert named == list(request_schema(LIMITS)["properties"])
