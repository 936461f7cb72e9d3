"""Parts of a caller's own, and arguments that a newcomer gets wrong: refused under the name of the part."""

# Shape legend: B batch, K experts.
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath, as_velocity, path_named
from ddm.ensemble import Ensemble, SamplingOptions, Strategy
from ddm.errors import ArchipelagoError, DataError, MathError, SetupError, ShapeError
from ddm.io.pictures import grid
from ddm.routers.classifier import ClassifierRouter
from ddm.sampling.likelihood import LikelihoodOptions
from ddm.sampling.strategies import StepRule
from tests.support.case import case
from tests.support.gaussian_mixture import four_silos

MIXTURE = four_silos()
EXACT = Ensemble(MIXTURE.experts(), MIXTURE, MIXTURE.prior_K, shape=(2,))
DDPM = path_named("ddpm_linear")


def draw(ensemble: Ensemble = EXACT, num: int | None = 4, **arguments: Any) -> Any:
    options = {}
    for name in ("solver", "numbers", "seeds", "times", "router_every"):
        if name in arguments:
            options[name] = arguments.pop(name)
    if options:
        arguments["options"] = SamplingOptions(**options)
    return ensemble.sample(num, **({"steps": 2, "progress": False} | arguments))


def refusal(call: Callable[[], object]) -> ArchipelagoError:
    with pytest.raises(ArchipelagoError) as caught:
        call()
    return caught.value


def test_answer_of_an_expert_is_refused_by_name_when_it_is_no_velocity_of_x():
    answers = {
        "output object": lambda x_B: SimpleNamespace(sample=x_B),
        "tuple": lambda x_B: (x_B,),
        "nothing": lambda x_B: None,
        "array": lambda x_B: x_B.numpy(),
        "variance beside it": lambda x_B: torch.cat([x_B, x_B], 1),
        "fewer samples": lambda x_B: x_B[:1],
    }
    for name, answer in answers.items():

        def expert(x_B: Tensor, t_B: Tensor, answer: Any = answer) -> Any:
            return answer(x_B)

        ddpm_expert = as_velocity(expert, "eps", DDPM, LinearPath())
        for own in (expert, ddpm_expert):
            with case(name, own):
                ensemble = Ensemble([own], None, [1.0], shape=(2,))
                error = refusal(lambda ensemble=ensemble: draw(ensemble))
                assert isinstance(error, ShapeError) and error.subject == "expert"


def test_output_object_of_an_expert_names_what_diffusers_needs():
    expert: Any = lambda x_B, t_B: SimpleNamespace(sample=x_B)  # noqa: E731
    error = refusal(lambda: draw(Ensemble([expert], None, [1.0], shape=(2,))))
    assert "return_dict=False" in error.remedy


def test_solver_is_refused_by_name_when_its_times_or_its_answer_do_not_fit():
    solvers: dict[str, Any] = {
        "nothing": lambda velocity, x_B, t, t_next: None,
        "fewer samples": lambda velocity, x_B, t, t_next: x_B[:1],
        "array": lambda velocity, x_B, t, t_next: x_B.numpy(),
        "time as a number": lambda velocity, x_B, t, t_next: x_B + velocity(x_B, t),
        "one time": lambda velocity, x_B, t, t_next: x_B + velocity(x_B, torch.tensor(t)),
    }
    for name, solver in solvers.items():
        for strategy in ("lock", "full"):
            with case(name, strategy):
                error = refusal(
                    lambda solver=solver, strategy=strategy: draw(solver=solver, strategy=strategy)
                )
                assert isinstance(error, ShapeError)
                assert error.subject in ("t", "what the solver returned")


def test_router_is_refused_when_it_is_none_or_answers_with_no_tensor():
    class Silent:
        num_experts = 4

        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Any:
            return np.zeros((len(x_B), 4))

    error = refusal(lambda: draw(replace(EXACT, router=Silent()), strategy="full"))
    assert isinstance(error, ShapeError) and error.subject == "router"
    for router in (lambda x_B, t_B: x_B, object()):
        with case(router):
            error = refusal(lambda router=router: replace(EXACT, router=router))
            assert isinstance(error, ShapeError) and error.subject == "router"


def test_strategy_is_refused_by_name_when_its_rule_or_its_selection_is_none():
    def made(rule: Any, selection: Any) -> Strategy:
        class Own(Strategy):
            name = "own"

            def step_rule(self, t: float, t_before: float) -> StepRule:
                return rule  # type: ignore[no-any-return]

            def select(self, w_BK: Tensor) -> Tensor:
                return selection(w_BK)  # type: ignore[no-any-return]

        return Own()

    every = lambda w_BK: w_BK > 0  # noqa: E731
    cases: tuple[tuple[Any, Any], ...] = (
        ("MIXTURE", every),
        (None, every),
        (StepRule.SELECT, lambda w_BK: w_BK),
        (StepRule.SELECT, lambda w_BK: w_BK.topk(2).indices),
        (StepRule.SELECT, lambda w_BK: w_BK[0] > 0),
        (StepRule.SELECT, lambda w_BK: w_BK > 2),
        (StepRule.SELECT, lambda w_BK: None),
    )
    for rule, selection in cases:
        with case(rule, selection):
            error = refusal(lambda own=made(rule, selection): draw(strategy=own))
            assert isinstance(error, MathError)
            assert error.subject.endswith("of the strategy Own")
    assert len(draw(strategy=made(StepRule.SELECT, every))) == 4


def test_callback_is_refused_when_it_returns_no_tensor():
    for answer in (3, np.zeros((4, 2))):
        with case(answer):
            error = refusal(lambda answer=answer: draw(callback=lambda *state: answer))
            assert isinstance(error, ShapeError)


def test_names_of_other_libraries_are_refused_when_a_path_or_a_prediction_is_named():
    own: Any = lambda x_B, t_B: x_B  # noqa: E731
    linear = LinearPath()
    calls: tuple[Callable[[], object], ...] = (
        lambda: as_velocity(own, "epsilon", DDPM, linear),  # type: ignore[arg-type]
        lambda: as_velocity(own, "v_prediction", DDPM, linear),  # type: ignore[arg-type]
        lambda: as_velocity(own, "eps", "ddpm_linear", linear),  # type: ignore[arg-type]
        lambda: as_velocity(own, "eps", DDPM, "linear"),  # type: ignore[arg-type]
        lambda: path_named("ddpm"),  # type: ignore[call-overload]
        lambda: replace(EXACT, path="linear"),  # type: ignore[arg-type]
    )
    for call in calls:
        with case(call):
            assert isinstance(refusal(call), MathError)


def test_classifier_of_float32_routes_samples_in_float64():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 4)

        def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            logits_BK: Tensor = self.layer(x_B * t_B[:, None])
            return logits_BK

    torch.manual_seed(0)
    routed = replace(EXACT, router=ClassifierRouter(Classifier(), MIXTURE.prior_K))
    x_B, t_B = torch.randn(5, 2), torch.full((5,), 0.5)
    narrow = routed.posterior(x_B, t_B)
    assert torch.allclose(routed.posterior(x_B.double(), t_B), narrow, atol=1e-6)
    in_float64 = SamplingOptions(dtype=torch.float64)
    drawn = routed.sample(8, strategy="full", steps=3, progress=False, options=in_float64)
    assert drawn.images.dtype is torch.float64


def test_numbers_or_seeds_state_how_many_samples_there_are():
    whole = draw(num=6)
    for numbers in (range(2, 5), np.arange(2, 5), torch.arange(2, 5), [2, 3, 4]):
        with case(numbers):
            part = draw(num=None, numbers=numbers)
            assert torch.allclose(part.images, whole.images[2:5], atol=1e-6)
    assert len(draw(num=None, seeds=np.arange(3))) == 3
    assert isinstance(refusal(lambda: draw(num=None, numbers=[0.5])), MathError)


def test_one_image_has_as_many_variations_and_completions_as_asked_for():
    image = torch.tensor([[[[0.3, -0.2]]]])

    def silo(x_B: Tensor, t_B: Tensor) -> Tensor:
        return (x_B - 2) / t_B.clamp(min=1e-3)[:, None, None, None]

    ensemble = Ensemble([silo], None, [1.0], shape=(1, 1, 2))
    known = torch.tensor([[True, False]])
    arguments: dict[str, Any] = {"steps": 2, "progress": False}
    varied = ensemble.image_to_image(image, 0.5, num=3, **arguments)
    repeated = ensemble.image_to_image(image.expand(3, -1, -1, -1), 0.5, **arguments)
    assert torch.equal(varied.images, repeated.images)
    completed = ensemble.inpaint(image, known, num=3, **arguments)
    assert torch.allclose(completed.images[:, 0, 0], torch.tensor([[0.3, 2.0]]).expand(3, 2))
    two = image.expand(2, -1, -1, -1)
    for call in (
        lambda: ensemble.image_to_image(two, 0.5, num=3, **arguments),
        lambda: ensemble.inpaint(two, known, num=3, **arguments),
    ):
        assert isinstance(refusal(call), ShapeError)


def test_wrong_types_are_refused_under_the_name_of_the_argument():
    x_B, t_B = torch.zeros(2, 2), torch.full((2,), 0.5)
    image: Any = torch.zeros(1, 1, 1, 2)
    known = torch.tensor([[True, False]])
    flat = replace(EXACT, experts=[lambda x_B, t_B: x_B], prior=[1.0], router=None, shape=(1, 1, 2))
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("prior", lambda: draw(prior="equal")),
        ("prior", lambda: EXACT.posterior(x_B, t_B, prior="equal")),  # type: ignore[arg-type]
        ("t", lambda: EXACT.posterior(x_B, t_B + 2)),
        ("t", lambda: EXACT.velocity(x_B, -t_B)),
        ("t", lambda: EXACT.velocity(x_B, t_B * float("nan"))),
        ("x", lambda: EXACT.posterior(x_B.long(), t_B)),
        ("t_start", lambda: flat.image_to_image(image, "0.5")),  # type: ignore[arg-type]
        ("images", lambda: flat.image_to_image(image[0], 0.5)),
        ("images", lambda: flat.image_to_image(image.byte(), 0.5)),
        ("corrections", lambda: flat.inpaint(image, known, corrections="9")),  # type: ignore[arg-type]
        ("corrections", lambda: flat.inpaint(image, known, corrections=1.5)),  # type: ignore[arg-type]
        ("router_every", lambda: draw(strategy="full", router_every="2")),
        ("guidance", lambda: draw(guidance="3")),
        ("guidance_interval", lambda: EXACT.velocity(x_B, t_B, guidance_interval=0.5)),  # type: ignore[arg-type]
        ("times", lambda: draw(times=1.0)),
        ("times", lambda: draw(times="1,0")),
        ("options", lambda: draw(options={"solver": "heun"})),
        ("options", lambda: draw(options=LikelihoodOptions())),
        ("options", lambda: EXACT.compute_likelihood(x_B, options=SamplingOptions())),  # type: ignore[arg-type]
        ("experts", lambda: replace(EXACT, experts=MIXTURE.experts()[0])),
        ("chunk_size", lambda: replace(EXACT, chunk_size=0)),
        ("network", lambda: ClassifierRouter([1, 1], [1, 1])),  # type: ignore[arg-type]
    )
    for subject, call in calls:
        with case(subject, call):
            assert refusal(call).subject == subject


def test_prior_by_a_word_of_the_command_line_names_the_list_to_give():
    error = refusal(lambda: draw(prior="equal"))
    assert isinstance(error, DataError) and "[1.0, 1.0] in place of 'equal'" in error.remedy


def test_ensemble_is_moved_to_no_device_that_torch_lacks():
    names = ["gpu", "float16"]
    if not torch.cuda.is_available():
        names.append("cuda")
    for name in names:
        with case(name):
            error = refusal(lambda name=name: EXACT.to(name))
            assert isinstance(error, SetupError) and error.subject == "device"


def test_grid_takes_arrays_and_refuses_what_it_cannot_arrange():
    images = torch.zeros(3, 1, 8, 8)
    assert grid(images.numpy()).tobytes() == grid(images).tobytes()
    calls: tuple[Callable[[], object], ...] = (
        lambda: grid(images[0]),
        lambda: grid(images[:0]),
        lambda: grid(torch.zeros(3, 2, 8, 8)),
        lambda: grid(images, [0, 1]),
        lambda: grid(images, columns=0),
        lambda: grid(images, columns=2.5),  # type: ignore[arg-type]
        lambda: grid(draw()),
    )
    for call in calls:
        with case(call):
            refusal(call)
