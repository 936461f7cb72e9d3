"""Measures how often screening flags honest silos and attacks, with tiny experts trained on scikit-learn's digits.

`python examples/screening/measure.py` prints the table of docs/explanation/screening.md; about five minutes of one
thread. Silos hold mixtures of digits drawn from a Dirichlet distribution, or one digit alone. Every attack takes the
place of each silo of each federation in turn.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from aggregator.intake.screening import ExpertFigures, Probe, absolute_faults, copies, fresh_rms, relative_faults
from ddm.diffusion.path import LinearPath
from ddm.models import build_expert
from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Dit, Training, UniformT
from ddm.system.console import table
from ddm.training.loop import train

SHAPE, NUM_PUBLIC, FEWEST = (1, 8, 8), 400, 40
ARCHITECTURE = Dit(patch=2, hidden=32, depth=2, heads=2)
FEDERATIONS = ((0, 4, 0.1), (1, 6, 0.1), (2, 4, 0.3), (3, 6, 0.3), (4, 4, 1.0), (5, 6, 1.0))  # seed, silos, alpha
ONE_DIGIT = 60  # images of a silo that holds one digit alone
Weights = Mapping[str, Tensor]


def recipe(num_steps: int) -> Training:
    """How every expert here is trained."""
    return Training(
        num_steps=num_steps,
        batch_size=64,
        learning_rate=0.004,
        weight_decay=0.01,
        ema_decay=0.99,
        checkpoint_steps=num_steps,
    )


def fit(images: Tensor, training: Training) -> Weights:
    """Train one expert."""
    with tempfile.TemporaryDirectory() as folder:
        return train(
            build_expert(ARCHITECTURE, SHAPE),
            images,
            training,
            LinearPath(),
            UniformT(),
            checkpoint_dir=Path(folder),
            on_progress=lambda progress: None,
            should_stop=lambda: False,
        ).ema


def federations(images: Tensor, digit: np.ndarray) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield public images and silos."""
    for seed, num_silos, alpha in FEDERATIONS:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(images))
        public, private = order[:NUM_PUBLIC], order[NUM_PUBLIC:]
        weight_KC = rng.dirichlet([alpha] * 10, size=num_silos) * rng.dirichlet([2.0] * num_silos)[:, None]
        weight_KC /= weight_KC.sum(0)
        owner = np.array([rng.choice(num_silos, p=weight_KC[:, c]) for c in digit[private]])
        silos = [images[private[owner == k]] for k in range(num_silos)]
        yield images[public], [silo for silo in silos if len(silo) >= FEWEST]


def attacks(weights: Weights) -> dict[str, Weights]:
    """Return the attacks that modify an honest expert."""
    generator = torch.Generator().manual_seed(0)

    def normal(std: Callable[[Tensor], float]) -> Weights:
        return {name: std(value) * torch.randn(value.shape, generator=generator) for name, value in weights.items()}

    return {
        "random weights, standard deviation 0.05": normal(lambda value: 0.05),
        "random weights, each tensor's own size": normal(lambda value: float(value.square().mean().sqrt())),
        "all weights x 3": {name: 3 * value for name, value in weights.items()},
        "all weights x 1.3": {name: 1.3 * value for name, value in weights.items()},
        "sign of the last layer flipped": {n: -v if n.startswith("head") else v for n, v in weights.items()},
        "constant answer": dict(weights) | {"head.weight": 0 * weights["head.weight"]},
        "untrained": build_expert(ARCHITECTURE, SHAPE, seed=1).state_dict(),
    }


def poisons(images: Tensor) -> dict[str, Tensor]:
    """Return the attacks that train on other images with the plan's recipe."""
    generator = torch.Generator().manual_seed(0)
    return {
        "trained on uniform noise": 2 * torch.rand(300, *SHAPE, generator=generator) - 1,
        "trained on white images": torch.ones(60, *SHAPE),
        "trained on inverted digits": -images[:300],
    }


def figures(weights: Weights, probe: Probe, name: str) -> ExpertFigures:
    """Measure an expert as intake does."""
    expert = build_expert(ARCHITECTURE, SHAPE)
    expert.load_state_dict(dict(weights))
    with torch.no_grad():
        losses = probe.losses(expert)
    excess = {name: float(value.square().mean().sqrt()) - fresh_rms(value.shape) for name, value in weights.items()}
    largest = max(excess, key=lambda name: excess[name])
    digest = sha256_hex(name.encode())
    rows = tuple(tuple(loss_N) for loss_N in losses.tolist())
    return ExpertFigures(expert_id=name, digest=digest, losses=rows, excess_rms=excess[largest], excess_tensor=largest)


def judge(others: Sequence[ExpertFigures], one: ExpertFigures, probe: Probe, training: Training) -> set[str]:
    """Return which checks flag `one` beside the others."""
    by_silo = {each.expert_id: [each] for each in others}
    found = {"alone"} if absolute_faults(one, probe, training) else set()
    found |= {"copy"} if copies(one, by_silo, training) else set()
    apart = relative_faults({**by_silo, one.expert_id: [one]})
    return found | ({"beside the others"} if one.expert_id in apart else set())


def measure(training: Training, num_federations: int = len(FEDERATIONS)) -> list[tuple[str, int, int, int, int]]:
    """Return rows: what, how often tried, flagged alone or as a copy, flagged beside the others, flagged at all."""
    digits = load_digits()
    images = torch.from_numpy((digits.images[:, None] / 8.0 - 1.0).astype(np.float32))
    poisoned = {name: fit(made_of, training) for name, made_of in poisons(images).items()}
    single = [fit(images[digits.target == c][:ONE_DIGIT], training) for c in range(10)]
    tried, counts = Counter[str](), Counter[tuple[str, str]]()

    def count(what: str, flags: set[str]) -> None:
        tried[what] += 1
        counts[what, "alone"] += bool(flags & {"alone", "copy"})
        counts[what, "beside the others"] += "beside the others" in flags
        counts[what, "at all"] += bool(flags)

    for number, (public, silos) in enumerate(federations(images, digits.target)):
        if number == num_federations:
            break
        probe = Probe.of(public[:64], public[100:].mean(0), LinearPath())
        weights = [fit(silo, training) for silo in silos]
        honest = [figures(each, probe, f"silo{k}") for k, each in enumerate(weights)]
        for k, one in enumerate(honest):
            others = honest[:k] + honest[k + 1 :]
            count("honest, mixture of digits", judge(others, one, probe, training))
            for digit, each in enumerate(single):
                alone = figures(each, probe, f"digit{digit}")
                count("honest, one digit alone, 60 images", judge(others, alone, probe, training))
            made = attacks(weights[k]) | poisoned
            made["copy of another silo's, retouched by 1e-5"] = {n: 1.00001 * v for n, v in weights[k - 1].items()}
            for what, each in made.items():
                count(what, judge(others, figures(each, probe, "cheat"), probe, training))
    kinds = ("alone", "beside the others", "at all")
    return [(what, number, *(counts[what, kind] for kind in kinds)) for what, number in tried.items()]  # type: ignore[misc]


def main() -> None:
    """Command line: --steps N."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    torch.set_num_threads(1)
    rows = measure(recipe(parser.parse_args().steps))
    print(table(rows, ("expert", "tried", "flagged alone", "flagged beside the others", "flagged at all")))


if __name__ == "__main__":
    main()
