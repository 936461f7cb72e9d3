"""The how-to page on extensions in Python, run as it stands; and what its examples rest on."""

import re
import subprocess
import sys
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddm.diffusion.path import CosinePath, LinearPath, as_velocity
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import MathError, ShapeError
from ddm.protocol.weight_privacy import DpSgd
from ddm.routers.classifier import ClassifierRouter
from ddm.training.private import make_private
from tests.support.case import case
from tests.support.gaussian_mixture import four_silos

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "extend-in-python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", HOW_TO.read_text("utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page defines."""
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, namespace)
    return namespace


def test_router_of_the_page_knows_the_nearer_expert(names: dict[str, Any]) -> None:
    weights = names["routed"].posterior(torch.ones(1, 2), torch.full((1,), 0.5)).exp()
    assert float(weights[0, 1]) > 0.9
    # The classifier saw three samples of the first expert for one of the second, and is asked for equal shares.
    drawn = names["learned"].sample(2000, strategy="sample", progress=False)
    assert abs(drawn.shares[0] - 0.5) < 0.1


def test_strategy_of_the_page_mixes_and_then_keeps_one_expert(names: dict[str, Any]) -> None:
    followed = names["drawn"].provenance[0]
    assert followed[0].experts == (0, 1) and len(followed[-1].experts) == 1
    assert followed[-1].t == pytest.approx(0.48, abs=0.03)
    nearest = names["drawn"].images.abs().mean()
    assert float(nearest) == pytest.approx(1.0, abs=0.05)


def test_solver_of_the_page_arrives_at_the_data(names: dict[str, Any]) -> None:
    images = names["ralston"].images
    assert float(images.abs().mean()) == pytest.approx(1.0, abs=0.05)
    assert names["finished"].steps == 20
    fid = names["evaluate"](images, names["reference"], features=names["squares"]).metrics["fid"]
    assert 0 <= fid.value < 1


def share_of_page(x: torch.Tensor, t: float = 0.0) -> torch.Tensor:
    """The distribution function of the first value of the page's data at a time."""
    deviation = sqrt((1 - t) ** 2 * 0.1**2 + t**2)
    parts = [torch.special.ndtr((x - (1 - t) * mean) / deviation) for mean in (-1.0, 1.0)]
    return (parts[0] + parts[1]) / 2


def distance_from_page(images: torch.Tensor, t: float = 0.0) -> float:
    """Kolmogorov's distance, in its standard deviations: above 1.95 once in a thousand."""
    values = images[:, 0].double().sort().values
    num = len(values)
    share = share_of_page(values, t)
    steps = torch.arange(num + 1).double() / num
    distance = torch.maximum(share - steps[:-1], steps[1:] - share).max()
    return float(distance) * sqrt(num)


def test_adaptive_solver_of_the_page_agrees_with_many_small_steps(names: dict[str, Any]) -> None:
    options = SamplingOptions(solver="rk4")
    fine = names["ensemble"].sample(100, steps=200, progress=False, options=options)
    torch.testing.assert_close(names["adaptive"].images, fine.images, atol=1e-3, rtol=0)


def test_churn_of_the_page_keeps_the_distribution_and_the_sample_of_a_number(
    names: dict[str, Any],
) -> None:
    sample = names["sample_with_churn"]
    for churn in (0.0, 0.2, 0.4):
        with case(churn=churn):
            drawn = sample(names["ensemble"], 3000, churn)
            assert distance_from_page(drawn.images) < 1.95
            assert abs(float(drawn.images.abs().std()) - 0.1) < 0.006
    # Under the mixture, samples change sides where the noise is renewed.
    mixed = replace(names["routed"], chunk_size=512)
    assert distance_from_page(sample(mixed, 1000, 0.4).images) < 1.95
    few = sample(names["ensemble"], 5, 0.4).images
    torch.testing.assert_close(few, drawn.images[:5])
    unlike = sample(names["ensemble"], 5, 0.4, seed=1).images
    assert not torch.allclose(few, unlike, atol=1e-2)
    # The step goes too far where no noise brings the sample back.
    page = HOW_TO.read_text("utf-8")
    block = next(block for block in BLOCKS if "def sample_with_churn" in block)
    assert "callback=add_noise, " in page
    namespace = dict(names)
    exec(block.replace("callback=add_noise, ", ""), namespace)
    assert float(namespace["churned"].images.abs().std()) < 0.09


def test_times_of_the_page_are_those_of_edm_and_reach_the_data(names: dict[str, Any]) -> None:
    sigmas = [t / (1 - t) for t in names["edm_times"]]
    # Karras et al. 2022, equation 5, written out.
    for number, sigma in enumerate(sigmas):
        root = 80 ** (1 / 7) + number / 23 * (0.002 ** (1 / 7) - 80 ** (1 / 7))
        assert sigma == pytest.approx(root**7, rel=1e-6)
    assert distance_from_page(names["spaced"].images) < 1.95


def test_autoguidance_of_the_page_narrows_the_data_as_the_closed_form_says(
    names: dict[str, Any],
) -> None:
    """Deviations of normal data are multiplied along the way: s_good^w / s_worse^(w - 1)."""
    spread = names["sharper"].images.abs() - 1
    assert float(spread.std()) == pytest.approx(0.1**2 / 0.2, rel=0.08)
    assert abs(float(spread.mean())) < 0.01
    pairs = names["pairs"]
    for weight, deviation in ((1.0, 0.1), (1.5, 0.1**1.5 / 0.2**0.5)):
        experts = [names["Autoguided"](good, worse, weight) for good, worse in pairs]
        drawn = replace(names["ensemble"], experts=experts).sample(500, progress=False)
        assert float((drawn.images.abs() - 1).std()) == pytest.approx(deviation, rel=0.08)


def test_gradient_of_the_page_leads_towards_its_aim(names: dict[str, Any]) -> None:
    assert bool((names["gradient_B"] < 0).all())


def test_writer_of_the_page_gets_the_lines_of_the_curve(names: dict[str, Any]) -> None:
    rows = [row.split(",") for row in names["rows"]]
    curve = names["curve"]
    assert [int(row[0]) for row in rows] == [one.step for one in curve] == [10, 20]
    assert [float(row[1]) for row in rows] == [one.loss for one in curve]


@pytest.mark.slow
def test_examples_of_the_page_are_typed(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text("\n".join(BLOCKS))
    # Without the project's settings, whose strictness refuses calls of torch itself.
    words = [sys.executable, "-m", "mypy", "--config-file=", "--disallow-untyped-defs"]
    # SciPy has no types of its own.
    words += ["--ignore-missing-imports", str(page)]
    finished = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout


def test_classifier_is_divided_by_the_shares_of_its_training() -> None:
    """Exact posteriors under other shares give back the mixture's own."""
    mixture = four_silos(LinearPath())
    training_prior = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)

    def logits(x_B: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        return mixture.log_likelihood(x_B, t_B) + training_prior.log() + 3.0

    experts = mixture.experts()
    ours = Ensemble(experts, ClassifierRouter(logits, training_prior), mixture.prior_K, (2,))
    exact = Ensemble(experts, mixture, mixture.prior_K, (2,))
    x_B = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t_B = torch.linspace(0.1, 1, 50, dtype=torch.float64)
    torch.testing.assert_close(ours.posterior(x_B, t_B), exact.posterior(x_B, t_B))


def test_classifier_of_other_experts_is_refused() -> None:
    with pytest.raises(ShapeError) as caught:
        ClassifierRouter(lambda x, t: x, [1.0, 0.0])
    assert caught.value.subject == "training_prior"
    router = ClassifierRouter(lambda x, t: torch.zeros(len(x), 3), [1.0, 1.0])
    with pytest.raises(ShapeError) as caught:
        router.log_likelihood(torch.zeros(4, 2), torch.ones(4))
    assert caught.value.subject == "the classifier's logits"


def test_wrapped_networks_and_classifiers_move_with_the_ensemble() -> None:
    network = nn.Linear(2, 2)

    class OwnExpert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = network

        def forward(self, x_B: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return self.layer(x_B)  # type: ignore[no-any-return]

    wrapped = as_velocity(OwnExpert(), "eps", CosinePath(), LinearPath())
    assert [parameter is network.weight for parameter in wrapped.parameters()][0]
    router = ClassifierRouter(nn.Bilinear(2, 1, 2), [1.0, 3.0])
    moved = Ensemble([wrapped, wrapped], router, [1.0, 1.0], (2,)).to("meta")
    assert {weight.device.type for weight in moved.experts[0].parameters()} == {"meta"}  # type: ignore[attr-defined]
    assert moved.router.log_shares_K.device.type == "meta"  # type: ignore[union-attr]
    assert network.weight.device.type == "cpu"


def test_solver_that_is_neither_a_name_nor_a_function_is_refused() -> None:
    ensemble = Ensemble([lambda x, t: x], None, [1.0], (2,))
    for wrong in ("euler2", 3):
        with pytest.raises(MathError) as caught:
            ensemble.sample(2, options=SamplingOptions(solver=wrong))  # type: ignore[arg-type]
        assert caught.value.subject == "solver"


def test_less_epsilon_takes_more_noise_and_each_training_has_its_own_secret() -> None:
    unit_N = torch.arange(40) // 2
    terms = DpSgd(epsilon=8.0, delta=1e-5, units_per_step=5)
    private = make_private(unit_N, terms, 50)
    assert private.paid.rate == 0.25 and private.paid.steps == 50 and private.num_units == 20
    stricter = make_private(unit_N, terms.model_copy(update={"epsilon": 2.0}), 50)
    assert stricter.paid.noise_multiplier > 2 * private.paid.noise_multiplier
    assert stricter.secret != private.secret
