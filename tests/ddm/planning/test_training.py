"""What a recipe leaves out of the training is filled in from the expert's size, and a plan states all of it."""

import json
from collections.abc import Mapping

import pytest

from ddm.planning.architectures import ExpertRecipe
from ddm.protocol.learning import Expert, Training

LEAST = {"num_steps": 2000, "batch_size": 64}
DIT = {"kind": "dit", "patch": 2, "hidden": 64, "depth": 2, "heads": 4}


def expert(architecture: Mapping[str, object] = DIT, **training: object) -> Expert:
    """The expert of a plan whose recipe says this, read as from a TOML file."""
    stated = {"architecture": architecture, "training": LEAST | training}
    return ExpertRecipe.model_validate_json(json.dumps(stated)).plain()


@pytest.mark.parametrize(
    ("architecture", "rate"),
    [
        (DIT, 0.5 / 64),
        ({"kind": "dit", "size": "XL/2"}, 0.5 / 1152),
        ({"kind": "mmdit", "size": "3B/2"}, 0.5 / 2560),
    ],
)
def test_learning_rate_follows_from_the_width(
    architecture: Mapping[str, object], rate: float
) -> None:
    assert expert(architecture).training.learning_rate == pytest.approx(rate, rel=1e-12)


def test_unet_needs_a_rate() -> None:
    unet = {"kind": "unet", "channels": (32, 64), "attention": (False, True)}
    with pytest.raises(ValueError, match="learning_rate is needed for a unet"):
        expert(unet)
    assert expert(unet, learning_rate=0.0002).training.learning_rate == 0.0002


@pytest.mark.parametrize(("num_steps", "warmup"), [(20_000, 100), (2000, 100), (50, 2), (10, 0)])
def test_rate_rises_over_a_twentieth_of_the_steps_and_at_most_100(
    num_steps: int, warmup: int
) -> None:
    assert expert(num_steps=num_steps).training.warmup_steps == warmup
    assert expert(num_steps=num_steps, warmup_steps=7).training.warmup_steps == 7


def test_what_a_recipe_says_stands() -> None:
    stated = {
        "learning_rate": 0.003,
        "schedule": "constant",
        "weight_decay": 0.0,
        "precision": "fp32",
    }
    training = expert(**stated, ema_decay=0.9, betas=(0.8, 0.9)).training
    assert {name: getattr(training, name) for name in stated} == stated
    assert (training.ema_decay, training.ema_width) == (0.9, None)
    assert training.betas == (0.8, 0.9)


def test_plan_states_every_number_and_reads_back_as_it_was() -> None:
    training = expert().training
    assert type(training) is Training
    assert (training.schedule, training.precision, training.ema_width) == ("cosine", "auto", 0.1)
    assert Training.model_validate_json(training.model_dump_json()) == training
    stated = {
        "learning_rate",
        "schedule",
        "weight_decay",
        "precision",
        "ema_width",
    }
    assert stated <= training.model_dump().keys(), (
        "what later versions fill in otherwise must not be left out"
    )
