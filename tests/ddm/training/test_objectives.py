"""What plans may ask experts to learn: mixed objectives, shifted times, hidden conditions, parts of the tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from ddm.diffusion.path import Velocity, path_named
from ddm.errors import ShapeError
from ddm.loading.ensemble import on_path
from ddm.models import build_expert
from ddm.protocol.architecture import ClassCondition, Dit
from ddm.protocol.base import Model
from ddm.protocol.learning import (
    Expert,
    ExpertObjective,
    LogitNormalT,
    Objective,
    SiloObjective,
    UniformT,
)
from ddm.protocol.plan import Plan
from ddm.routers.base import log_prior, posterior
from ddm.sampling.mixture import mix_velocity
from ddm.training.batches import Examples, draw_batch, draw_times
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun, train
from ddm.training.masking import draw_kept, first_whole_step
from ddm.training.objective import TrainingObjective
from tests.ddm.training.test_loop import SHAPE, SMALL, Run, images, same_bytes, settings
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import four_silos

LEARNED = [
    ExpertObjective(),
    ExpertObjective(path="cosine_vp"),
    ExpertObjective(prediction="eps"),
    ExpertObjective(path="cosine_vp", prediction="eps"),
]


def exact_expert(k: int, learned: ExpertObjective) -> Velocity:
    """What a perfect expert of silo k answers when it was trained on an objective of its own."""
    mixture = four_silos(path_named(learned.path))
    return mixture.eps_expert(k) if learned.prediction == "eps" else mixture.expert(k)


@pytest.mark.parametrize("canonical", ["linear", "cosine_vp"])
def test_exact_experts_of_four_objectives_mix_to_the_exact_velocity_and_unconverted_ones_do_not(
    canonical: str,
) -> None:
    path = path_named(canonical)  # type: ignore[arg-type]
    mixture = four_silos(path)
    # where an eps-expert is asked at times below the one beyond which its answer is continued
    t_B = torch.linspace(0.02, 0.95, 200, dtype=torch.float64)
    x_B = 2 * torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w_BK = posterior(mixture, x_B, t_B, log_prior(mixture.prior_K, 4))
    plain = [exact_expert(k, learned) for k, learned in enumerate(LEARNED)]
    wrapped = [
        on_path(expert, learned, path) for expert, learned in zip(plain, LEARNED, strict=True)
    ]
    exact = mixture.velocity(x_B, t_B)
    assert (mix_velocity(wrapped, x_B, t_B, w_BK) - exact).abs().max() < 1e-10
    assert (mix_velocity(plain, x_B, t_B, w_BK) - exact).abs().max() > 0.1


def test_silo_learns_its_exception_and_every_other_the_objective_of_the_plan() -> None:
    other = SiloObjective(silo_id="north", path="cosine_vp", prediction="eps")
    objective = Objective(exceptions=(other,))
    assert objective.of("north") == other
    assert (objective.of("east").path, objective.of("east").prediction) == ("linear", "velocity")


@pytest.mark.parametrize("silos", [("nobody",), ("north", "east"), ("north", "north")])
def test_plan_with_exceptions_for_strangers_or_out_of_order_is_refused(
    silos: tuple[str, ...],
) -> None:
    exceptions = [{"silo_id": silo, "path": "linear", "prediction": "eps"} for silo in silos]
    document = plan_document(
        objective={"path": "linear", "prediction": "velocity", "exceptions": exceptions}
    )
    with pytest.raises(Exception, match="exceptions of the objective"):
        Plan.parse(to_bytes(document), subject="plan")


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_shifted_time_loses_as_much_as_s_times_the_noise_ratio(shift: float) -> None:
    for plain, shifted in (
        (UniformT(), UniformT(shift=shift)),
        (LogitNormalT(mean=0.3), LogitNormalT(mean=0.3, shift=shift)),
    ):
        t_B, s_B = (
            draw_times(kind, 64, np.random.default_rng(5)).double() for kind in (plain, shifted)
        )
        inside = (t_B > 1e-3) & (t_B < 1 - 1e-3)
        assert torch.allclose(
            (s_B / (1 - s_B))[inside], shift * (t_B / (1 - t_B))[inside], rtol=1e-4
        )
        assert torch.equal(t_B, s_B) == (shift == 1.0)


def labelled(num_classes: int) -> Examples:
    """Images that are as bright as their class."""
    label_N = torch.arange(40) % num_classes
    return Examples(label_N[:, None, None, None].expand(-1, *SHAPE).float(), label_N, drop=0.25)


def test_conditions_belong_to_their_images_and_are_hidden_as_often_as_asked() -> None:
    recipe = settings(batch_size=64)
    hidden = 0
    for n in range(50):
        batch = draw_batch(labelled(5), recipe, n, UniformT())
        assert batch.condition is not None
        shown = batch.condition >= 0
        assert torch.equal(batch.x_0[:, 0, 0, 0][shown], batch.condition[shown].float())
        assert set(batch.condition[~shown].tolist()) <= {-1}
        hidden += int((~shown).sum())
    expected = 50 * 64 * 0.25
    deviation = (50 * 64 * 0.25 * 0.75) ** 0.5
    assert abs(hidden - expected) < 4 * deviation


def test_hidden_text_is_all_zeros_and_labels_change_nothing_else_of_a_batch() -> None:
    text_NLD = torch.rand(40, 3, 2) + 0.1
    with_it = draw_batch(Examples(images(), text_NLD, drop=0.5), settings(), 3, UniformT())
    without = draw_batch(Examples(images()), settings(), 3, UniformT())
    assert with_it.condition is not None
    assert {bool((condition == 0).all()) for condition in with_it.condition} == {True, False}
    assert all((condition == 0).all() or (condition != 0).all() for condition in with_it.condition)
    assert torch.equal(with_it.eps, without.eps)
    assert torch.equal(with_it.t_B, without.t_B)


def conditional(folder: Path, label_N: Tensor, drop: float, **changes: object) -> FinishedTraining:
    condition = ClassCondition(num_classes=2)
    return train(
        build_expert(SMALL, SHAPE, condition=condition, seed=3),
        Examples(label_N[:, None, None, None].expand(-1, *SHAPE) * 2.0 - 1.0, label_N, drop),
        settings(num_steps=100, learning_rate=0.03, **changes),
        TrainingObjective(),
        TrainingRun(folder, engine=Engine(device="cpu")),
    )


def test_expert_that_is_told_classes_tells_them_apart_where_noise_hides_them(
    tmp_path: Path,
) -> None:
    label_N = torch.arange(40) % 2

    def error(drop: float) -> float:
        """How far the data that it sees in pure noise are from the class it is told."""
        expert = build_expert(SMALL, SHAPE, condition=ClassCondition(num_classes=2))
        expert.load_state_dict(conditional(tmp_path / str(drop), label_N, drop).ema)
        eps = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            x_0 = eps - expert(eps, torch.ones(40), label_N)
        return float((x_0.mean((1, 2, 3)) - (label_N * 2.0 - 1.0)).abs().mean())

    assert error(drop=0.1) < 0.4
    assert error(drop=0.999) > 0.8, "an expert that was never told"


def test_labels_of_other_images_are_refused() -> None:
    with pytest.raises(ShapeError, check=has_subject("labels")):
        Examples(images(), torch.zeros(39, dtype=torch.int64))


def test_kept_tokens_are_distinct_ascending_and_all_equally_likely() -> None:
    random = np.random.default_rng(0)
    kept_BM = draw_kept(4000, 16, 0.75, random)
    assert kept_BM.shape == (4000, 4)
    assert bool((kept_BM.diff(dim=1) > 0).all())
    frequency = torch.bincount(kept_BM.flatten(), minlength=16) / 4000
    assert (frequency - 0.25).abs().max() < 4 * (0.25 * 0.75 / 4000) ** 0.5


def test_masked_network_sees_the_kept_tokens_alone_and_all_of_them_as_the_whole_one_does() -> None:
    model = build_expert(SMALL, SHAPE, seed=3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    x = images(5)
    t = torch.linspace(0.1, 0.9, 5)
    every = torch.arange(4).expand(5, -1)
    some = torch.tensor([[0, 3]]).expand(5, -1)
    hidden = x.clone()
    hidden[:, :, :2, 2:] = 7.0  # the second token
    with torch.no_grad():
        patches = model(x, t, kept_BM=every)
        assert torch.allclose(
            patches[:, 0].reshape(5, 1, 2, 2), model(x, t)[:, :, :2, :2], atol=1e-6
        )
        assert torch.equal(model(x, t, kept_BM=some), model(hidden, t, kept_BM=some))
        assert not torch.allclose(
            model(x, t)[:, :, :2, :2], model(hidden, t)[:, :, :2, :2], atol=1e-3
        )


def test_last_steps_leave_nothing_out_and_the_operations_counted_are_fewer(tmp_path: Path) -> None:
    recipe = settings(mask_ratio=0.5, unmasked_share=0.2)
    assert first_whole_step(recipe) == 24
    kept = [
        draw_batch(Examples(images()), recipe, n, UniformT(), num_tokens=4).kept_BM
        for n in (0, 23, 24, 29)
    ]
    assert [part is None for part in kept] == [False, False, True, True]
    masked = Run(tmp_path / "masked", recipe)()
    whole = Run(tmp_path / "whole")()
    assert masked.flops < 0.8 * whole.flops
    assert not same_bytes(masked.ema, whole.ema)


def test_masked_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    recipe = settings(mask_ratio=0.5, unmasked_share=0.2)
    whole = Run(tmp_path / "whole", recipe)()
    for _ in range(2):
        questions: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            Run(tmp_path / "stopped", recipe)(
                lambda questions=questions: len(questions) == 13 or bool(questions.append(1))
            )
    assert same_bytes(Run(tmp_path / "stopped", recipe)().ema, whole.ema)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (UniformT, {"shift": 0.0}),
        (Objective, {"path": "vp"}),
        (Objective, {"prediction": "score"}),
        (ClassCondition, {"num_classes": 4, "drop": 1.0}),
    ],
)
def test_objectives_out_of_range_are_refused(kind: type[Model], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(values)


def test_plan_that_leaves_tokens_out_of_a_network_without_tokens_is_refused() -> None:
    unet = {"kind": "unet", "channels": (32,), "attention": (False,)}
    recipe = settings(mask_ratio=0.5).model_dump()
    Expert.model_validate(
        {"architecture": Dit(patch=2, hidden=8, depth=1, heads=1), "training": recipe}
    )
    with pytest.raises(ValidationError, match="mask_ratio"):
        Expert.model_validate({"architecture": unet, "training": recipe})
