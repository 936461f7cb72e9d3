"""Which experts screening finds implausible: attacks on really trained ones, and honest ones as different as may be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aggregator.intake.flags import Fault
from aggregator.intake.screening import (
    MAX_LEARNT_RATIO,
    MIN_TRAVEL,
    BaseFigures,
    ExpertFigures,
    absolute_faults,
    copy_faults,
    fresh_rms,
    num_screening_images,
    relative_faults,
)
from aggregator.intake.sweep import WorstRow
from aggregator.intake.trial import Trial
from ddm.errors import TensorFileError
from ddm.io.tensors import save_tensors
from ddm.models import build_expert, streamed
from ddm.models.streamed import StreamedExpert, stored_tensors
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, Unet
from ddm.routers.evaluation import BANDS
from ddm.training.schedule import travel
from examples.screening.measure import answer_of, trial_of
from examples.screening.measure import figures as measured
from tests.support.federation import images
from tests.support.screening import ARCHITECTURE, SHAPE, TRAINING, public_images, train_expert

SILOS = {"east": -0.5, "north": -0.2, "south": 0.2, "west": 0.5}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def trial() -> Trial:
    return trial_of(public_images(), architecture=ARCHITECTURE)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """Experts of silos whose images are as different as the made-up ones can be."""
    folder = tmp_path_factory.mktemp("honest")
    experts = {}
    for seed, (silo, centre) in enumerate(SILOS.items()):
        experts[silo] = train_expert(folder / silo, torch.from_numpy(images(80, centre, seed)))
    return experts


def figures(weights: Weights, trial: Trial, name: str = "one", digest: str = "a") -> ExpertFigures:
    answer = answer_of(weights, architecture=ARCHITECTURE, shape=SHAPE)
    return measured(weights, answer, trial, name).model_copy(update={"digest": digest * 64})


def scaled(weights: Weights) -> Weights:
    return {name: 3 * value for name, value in weights.items()}


def flipped(weights: Weights) -> Weights:
    return {name: -value if name.startswith("head") else value for name, value in weights.items()}


def constant(weights: Weights) -> Weights:
    return weights | {"head.weight": 0 * weights["head.weight"], "head.bias": weights["head.bias"]}


def random(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.2 * torch.randn(value.shape, generator=generator) for name, value in weights.items()
    }


def endless(weights: Weights) -> Weights:
    return {name: torch.full_like(value, 9999.0) for name, value in weights.items()}


ATTACKS: list[tuple[Callable[[Weights], Weights], str, str]] = [
    (scaled, "times that of answering 0", "high_loss"),
    (flipped, "times that of answering 0", "high_loss"),
    (random, "times that of answering 0", "high_loss"),
    (endless, "times that of answering 0", "high_loss"),
    (constant, "times that of the best constant", "not_learnt"),
    (
        lambda weights: build_expert(ARCHITECTURE, SHAPE, seed=3).state_dict(),
        "as before its first training step",
        "answers_zero",
    ),
]


def words_of(faults: list[Fault]) -> list[str]:
    return [str(fault) for fault in faults]


def test_experts_of_different_silos_pass_every_check(
    honest: dict[str, Weights], trial: Trial
) -> None:
    figures_of_silos = {
        silo: figures(weights, trial, silo, "abcd"[k])
        for k, (silo, weights) in enumerate(honest.items())
    }
    for silo, own in figures_of_silos.items():
        assert absolute_faults(own, trial.probe, TRAINING) == []
        assert (
            copy_faults(
                own,
                {name: [other] for name, other in figures_of_silos.items() if name != silo},
                TRAINING,
            )
            == []
        )
    assert relative_faults({silo: [own] for silo, own in figures_of_silos.items()}) == {}


@pytest.mark.parametrize(
    ("attack", "words", "flag"),
    ATTACKS,
    ids=["scaled", "flipped", "random", "endless", "constant", "untrained"],
)
def test_attack_on_a_trained_expert_is_found(
    honest: dict[str, Weights],
    trial: Trial,
    attack: Callable[[Weights], Weights],
    words: str,
    flag: str,
) -> None:
    assert absolute_faults(figures(honest["north"], trial), trial.probe, TRAINING) == []
    faults = absolute_faults(figures(attack(honest["north"]), trial), trial.probe, TRAINING)
    assert any(words in str(fault) and fault.flag == flag for fault in faults), faults


def test_expert_trained_on_other_images_stands_apart_from_the_rest(
    honest: dict[str, Weights], trial: Trial, tmp_path: Path
) -> None:
    poison = figures(train_expert(tmp_path, torch.ones(80, *SHAPE)), trial, "poison")
    others = {silo: [figures(weights, trial, silo)] for silo, weights in honest.items()}
    assert list(relative_faults(others | {"poison": [poison]})) == ["poison"]
    two = {"poison": [poison], "east": others["east"]}
    assert relative_faults(two) == {}  # of two nobody can say which stands apart


def test_expert_of_few_steps_passes_in_a_rehearsal_alone(trial: Trial, tmp_path: Path) -> None:
    few = TRAINING.model_copy(update={"num_steps": 6})
    made = figures(train_expert(tmp_path, public_images(), few), trial)
    assert made.loss_Z[-1] > MAX_LEARNT_RATIO * trial.probe.constant_Z[-1]
    assert travel(few) < MIN_TRAVEL <= travel(TRAINING)
    assert absolute_faults(made, trial.probe, few, rehearsal=True) == []
    assert "not_learnt" in {fault.flag for fault in absolute_faults(made, trial.probe, few)}
    # a rehearsal that trains enough is judged
    assert absolute_faults(made, trial.probe, TRAINING, rehearsal=True)


def test_expert_of_a_plan_too_short_to_teach_anything_is_not_taken_for_a_trained_one(
    trial: Trial, tmp_path: Path
) -> None:
    """As in a trial of the product: 150 steps at the rate of a wide network, whose samples were pure noise."""
    changed = {
        "num_steps": 150,
        "learning_rate": 0.001,
        "schedule": "cosine",
    }
    short = TRAINING.model_copy(update=changed)
    made = figures(train_expert(tmp_path, public_images(), short), trial)
    assert travel(short) < MIN_TRAVEL
    flags = {fault.flag for fault in absolute_faults(made, trial.probe, short)}
    assert flags & {"not_learnt", "far_images"}, flags


def test_weights_beyond_the_reach_of_training_are_found(
    honest: dict[str, Weights], trial: Trial
) -> None:
    heavy = honest["north"] | {"head.bias": honest["north"]["head.bias"] + 2 * travel(TRAINING)}
    descriptions = words_of(absolute_faults(figures(heavy, trial), trial.probe, TRAINING))
    assert any("tensor head.bias grew by" in fault for fault in descriptions)


def test_no_fresh_expert_has_heavier_weights_than_a_fresh_one_may() -> None:
    for seed in range(20):
        for name, value in build_expert(ARCHITECTURE, SHAPE, seed=seed).state_dict().items():
            assert float(value.square().mean().sqrt()) <= fresh_rms(value.shape), name


@pytest.mark.parametrize(
    "condition", [NoCondition(), ClassCondition(num_classes=3)], ids=["none", "class"]
)
def test_no_fresh_unet_has_heavier_weights_than_a_fresh_one_may(condition: Condition) -> None:
    unet = Unet(
        channels=(8, 8), attention=(False, True), num_res_blocks=1, head_channels=4, norm_groups=4
    )
    for name, value in (
        build_expert(unet, (1, 8, 8), condition=condition, seed=1).state_dict().items()
    ):
        limit = fresh_rms(value.shape, has_unit_weights=True)
        assert float(value.square().mean().sqrt()) <= limit, name


def test_copy_is_found_byte_for_byte_and_by_its_answers(
    honest: dict[str, Weights], trial: Trial
) -> None:
    mine, theirs = (figures(honest["north"], trial, name) for name in ("mine", "theirs"))
    assert "byte for byte" in words_of(copy_faults(mine, {"north": [theirs]}, TRAINING))[0]
    nearly = {name: value * (1 + 1e-5) for name, value in honest["north"].items()}
    retouched = figures(nearly, trial, "mine", "b")
    faults = copy_faults(retouched, {"north": [theirs]}, TRAINING)
    assert words_of(faults) == ["expert mine predicts the same as expert theirs of north"]
    assert [(fault.expert_id, fault.flag) for fault in faults] == [("mine", "copy")]
    assert (
        copy_faults(figures(honest["east"], trial, "mine", "b"), {"north": [theirs]}, TRAINING)
        == []
    )


def test_honest_experts_of_a_short_training_from_a_foreign_base_are_no_copies(
    trial: Trial, tmp_path: Path
) -> None:
    """All of them first learn what the base lacks, and by that differ from it in the same way."""
    base = train_expert(tmp_path / "base", torch.ones(80, *SHAPE))
    base_answers = torch.tensor(figures(base, trial).answers)
    short = TRAINING.model_copy(update={"num_steps": 20})
    assert travel(short) < MIN_TRAVEL
    measured_experts = []
    for name, centre in (("east", -0.1), ("north", 0.1)):
        own_images = torch.from_numpy(images(80, centre, seed=len(name)))
        weights = train_expert(tmp_path / name, own_images, short, base=base)
        expert = figures(weights, trial, name, name[0].replace("n", "b"))
        difference = float((torch.tensor(expert.answers) - base_answers).square().mean())
        moved = BaseFigures(move=0.1, difference=difference)
        measured_experts.append(expert.model_copy(update={"base": moved}))
    east, north = measured_experts
    assert copy_faults(east, {"north": [north]}, short) == []
    # The control: by the rule alone they are copies, although each silo trained on its own images.
    assert [fault.flag for fault in copy_faults(east, {"north": [north]}, TRAINING)] == ["copy"]
    # The same file is a copy after any training.
    same_file = north.model_copy(update={"digest": east.digest})
    assert "byte for byte" in words_of(copy_faults(east, {"north": [same_file]}, short))[0]


def test_silo_that_is_slightly_worse_than_the_others_does_not_stand_apart() -> None:
    def one(name: str, loss: float) -> list[ExpertFigures]:
        losses = ((loss,),) * len(BANDS)
        worst = WorstRow(t=1.0, condition="", times=0.5, num_over=0, num_rows=64)
        excess = {"excess_rms": 0.0, "excess_tensor": "none"}
        return [
            ExpertFigures(
                expert_id=name,
                digest="a" * 64,
                losses=losses,
                answers=(),
                worst=worst,
                drawn=(),
                **excess,
            )
        ]

    by_silo = {"a": one("a", 0.50), "b": one("b", 0.51), "c": one("c", 0.49), "d": one("d", 0.8)}
    assert relative_faults(by_silo) == {}
    assert list(relative_faults(by_silo | {"d": one("d", 1.2)})) == ["d"]
    assert relative_faults(by_silo | {"d": one("d", 0.01)}) == {}  # to be better is no fault


def test_fewer_images_are_asked_of_an_expert_that_costs_more() -> None:
    assert num_screening_images(1e6) == 64
    assert num_screening_images(1e15) == 16
    assert num_screening_images(1e10) == 40


@pytest.mark.parametrize("part_bytes", [1 << 20, 256])
def test_streamed_expert_answers_as_the_loaded_one_does(
    honest: dict[str, Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(streamed, "PART_BYTES", part_bytes)
    path = tmp_path / "expert.safetensors"
    save_tensors(path, honest["north"])
    stored = stored_tensors(ARCHITECTURE, SHAPE, path, 1 << 20)
    loaded = build_expert(ARCHITECTURE, SHAPE)
    x = torch.randn(5, *SHAPE)
    t = torch.rand(5)
    answer = StreamedExpert(ARCHITECTURE, SHAPE, stored)(x, t)
    # a fresh one answers otherwise
    assert float((answer - loaded(x, t).detach()).abs().max()) > 0.1
    loaded.load_state_dict(honest["north"])
    torch.testing.assert_close(answer, loaded(x, t).detach(), rtol=1e-5, atol=1e-6)
    for name, value in honest["north"].items():
        assert stored[name].root_mean_square() == pytest.approx(
            float(value.square().mean().sqrt()), rel=1e-5
        )


def test_streamed_expert_of_another_architecture_is_refused(
    honest: dict[str, Weights], tmp_path: Path
) -> None:
    save_tensors(tmp_path / "expert.safetensors", honest["north"])
    other = ARCHITECTURE.model_copy(update={"depth": 2})
    with pytest.raises(TensorFileError):
        stored_tensors(other, SHAPE, tmp_path / "expert.safetensors", 1 << 20)


def test_streamed_expert_is_told_the_condition_of_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "_ACTIVATION_BYTES", 1)  # a sample at a time
    path = tmp_path / "expert.safetensors"
    classes = ClassCondition(num_classes=3)
    loaded = build_expert(ARCHITECTURE, SHAPE, condition=classes)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.3 * torch.randn(v.shape, generator=generator)
        for name, v in loaded.state_dict().items()
    }
    save_tensors(path, weights)
    loaded.load_state_dict(weights)
    stored = stored_tensors(ARCHITECTURE, SHAPE, path, 1 << 20, classes)
    x = torch.randn(5, *SHAPE, generator=generator)
    t = torch.rand(5, generator=generator)
    c = torch.arange(5) % 4 - 1
    answer = StreamedExpert(ARCHITECTURE, SHAPE, stored, classes)
    torch.testing.assert_close(answer(x, t, c), loaded(x, t, c).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer(x, t), loaded(x, t).detach(), rtol=1e-4, atol=1e-5)
    assert float((answer(x, t, c) - answer(x, t)).abs().max()) > 0.01
