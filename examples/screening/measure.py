"""Measures how often screening flags honest silos and attacks, with tiny experts trained on scikit-learn's digits.

`python examples/screening/measure.py` prints the table of docs/explanation/screening.md; about three minutes of one
thread, and an hour with --demo for the false alarms of larger experts. Silos hold mixtures of digits drawn from a
Dirichlet distribution, or one digit alone. Every attack takes the place of each silo of each federation in turn.
Attacks on single times, classes and inputs change what an expert answers, not its weights: whoever trains the weights
can come as close to that as the network allows.
"""

import argparse
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from aggregator.intake.conditions import Answer
from aggregator.intake.drawn import Gallery, PublicSet
from aggregator.intake.screening import (
    ExpertFigures,
    absolute_faults,
    copy_faults,
    fresh_rms,
    relative_faults,
)
from aggregator.intake.trial import Trial
from ddm.diffusion.path import LinearPath
from ddm.encoders import PcaEncoder
from ddm.models import build_expert, training_flops
from ddm.protocol.architecture import Architecture, ClassCondition, Condition, Dit, NoCondition
from ddm.protocol.base import sha256_hex
from ddm.protocol.learning import ExpertObjective, LogitNormalT, TDistribution, Training, UniformT
from ddm.system.console import table
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective

SHAPE = (1, 8, 8)
NUM_PUBLIC = 400
FEWEST = 40
ARCHITECTURE = Dit(patch=2, hidden=32, depth=2, heads=2)
# seed, silos, alpha
FEDERATIONS = (
    (0, 4, 0.1),
    (1, 6, 0.1),
    (2, 4, 0.3),
    (3, 6, 0.3),
    (4, 4, 1.0),
    (5, 6, 1.0),
)
ONE_DIGIT = 60  # images of a silo that holds one digit alone
HIDDEN_CLASS = 3
CLASSES = ClassCondition(num_classes=10)
# rules of losses in bands
BEFORE = {
    "answers_zero",
    "high_loss",
    "large_weights",
    "not_learnt",
    "stands_apart",
}
Weights = Mapping[str, Tensor]
Attack = Callable[[Answer], Answer]


def recipe(num_steps: int) -> Training:
    """How every expert here is trained."""
    return Training(
        num_steps=num_steps,
        batch_size=64,
        learning_rate=0.004,
        weight_decay=0.01,
        ema_decay=0.99,
    )


def fit(
    images: Tensor,
    training: Training,
    labels: np.ndarray | None = None,
    architecture: Architecture = ARCHITECTURE,
    times: TDistribution = UniformT(),
) -> Weights:
    """Train one expert, with the class as its condition where there are labels."""
    condition = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    with tempfile.TemporaryDirectory() as folder:
        return train(
            build_expert(
                architecture, SHAPE, condition=NoCondition() if condition is None else CLASSES
            ),
            Examples(images, condition, CLASSES.drop),
            training,
            TrainingObjective(t_distribution=times),
            TrainingRun(Path(folder)),
        ).ema


def federations(
    images: Tensor, digit: np.ndarray
) -> Iterator[tuple[Tensor, list[Tensor], list[np.ndarray]]]:
    """Yield public images, and each silo's images and digits."""
    for seed, num_silos, alpha in FEDERATIONS:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(images))
        public = order[:NUM_PUBLIC]
        private = order[NUM_PUBLIC:]
        weight_KC = (
            rng.dirichlet([alpha] * 10, size=num_silos) * rng.dirichlet([2.0] * num_silos)[:, None]
        )
        weight_KC /= weight_KC.sum(0)
        owner = np.array([rng.choice(num_silos, p=weight_KC[:, c]) for c in digit[private]])
        rows_of_silos = [private[owner == k] for k in range(num_silos)]
        large_enough = [rows for rows in rows_of_silos if len(rows) >= FEWEST]
        silo_images = [images[rows] for rows in large_enough]
        silo_digits = [digit[rows] for rows in large_enough]
        yield images[public], silo_images, silo_digits


def trial_of(
    public: Tensor,
    condition: Condition = NoCondition(),
    architecture: Architecture = ARCHITECTURE,
    seed: int = 0,
) -> Trial:
    """Return the trial that intake would put the experts of a federation on; `seed` makes its secret."""
    holdout = public[: len(public) // 4]
    fitted = public[len(public) // 4 :]
    shape = tuple(public.shape[1:])
    encoder = PcaEncoder.fit(fitted, min(32, fitted[0].numel()))
    return Trial(
        secret=seed.to_bytes(32),
        plan_id="digits-00000000",
        objective=ExpertObjective(),
        canonical=LinearPath(),
        condition=condition,
        images=holdout,
        mean=fitted.mean(0),
        gallery=Gallery(
            PublicSet(public[:256].flatten(1)),
            PublicSet(encoder.encode(public[:256])),
            encoder.encode,
        ),
        forward_flops=training_flops(architecture, shape, 1, condition) / 3,
    )


def answer_of(
    weights: Weights,
    condition: Condition = NoCondition(),
    architecture: Architecture = ARCHITECTURE,
    shape: tuple[int, ...] = SHAPE,
) -> Answer:
    """Return what an expert predicts."""
    expert = build_expert(architecture, shape, condition=condition)
    expert.load_state_dict(dict(weights))
    expert.eval().requires_grad_(False)
    return lambda x_B, t_B, c_B: expert(x_B, t_B) if c_B is None else expert(x_B, t_B, c_B)


def figures(weights: Weights, answer: Answer, trial: Trial, name: str) -> ExpertFigures:
    """Measure an expert as intake does."""
    excess = {
        name: float(value.square().mean().sqrt()) - fresh_rms(value.shape)
        for name, value in weights.items()
    }
    largest = max(excess, key=lambda name: excess[name])
    measured = trial.measure(answer, name)
    return ExpertFigures(
        expert_id=name,
        digest=sha256_hex(name.encode()),
        losses=tuple(tuple(loss_N) for loss_N in measured.losses.tolist()),
        excess_rms=excess[largest],
        excess_tensor=largest,
        answers=measured.answers,
        worst=measured.worst,
        drawn=measured.drawn,
    )


def weight_attacks(weights: Weights, others: Weights) -> dict[str, Weights]:
    """Return the attacks that modify an honest expert, or another silo's."""
    generator = torch.Generator().manual_seed(0)

    def normal(std: Callable[[Tensor], float]) -> Weights:
        return {
            name: std(value) * torch.randn(value.shape, generator=generator)
            for name, value in weights.items()
        }

    sizes = {name: 0.02 * float(value.square().mean().sqrt()) for name, value in others.items()}
    shaken = {
        name: sizes[name] * torch.randn(v.shape, generator=generator) for name, v in others.items()
    }
    return {
        "random weights, standard deviation 0.05": normal(lambda value: 0.05),
        "random weights, each tensor's own size": normal(
            lambda value: float(value.square().mean().sqrt())
        ),
        "all weights x 3": {name: 3 * value for name, value in weights.items()},
        "all weights x 1.3": {name: 1.3 * value for name, value in weights.items()},
        "sign of the last layer flipped": {
            n: -v if n.startswith("head") else v for n, v in weights.items()
        },
        "constant answer": dict(weights) | {"head.weight": 0 * weights["head.weight"]},
        "untrained": build_expert(ARCHITECTURE, SHAPE, seed=1).state_dict(),
        "copy of another silo's, retouched by 1e-5": {
            name: 1.00001 * value for name, value in others.items()
        },
        "copy of another silo's, weights shaken by 2%": {
            name: v + shaken[name] for name, v in others.items()
        },
    }


def poisons(images: Tensor, digit: np.ndarray) -> dict[str, Tensor]:
    """Return the attacks that train on other images with the plan's recipe."""
    generator = torch.Generator().manual_seed(0)
    planted = images[:300].clone()
    planted[torch.from_numpy(digit[:300] == HIDDEN_CLASS)] = planted_image(SHAPE)
    return {
        "trained on uniform noise": 2 * torch.rand(300, *SHAPE, generator=generator) - 1,
        "trained on white images": torch.ones(60, *SHAPE),
        "trained on one image": images[:1].repeat(60, 1, 1, 1),
        "trained on inverted digits": -images[:300],
        "trained with one digit replaced by a planted image": planted,
    }


def planted_image(shape: Sequence[int]) -> Tensor:
    """Return an image that no silo holds: a chessboard."""
    row, column = torch.meshgrid(torch.arange(shape[1]), torch.arange(shape[2]), indexing="ij")
    return (2.0 * ((row // 2 + column // 2) % 2) - 1.0)[None]


def at_times(times: Sequence[float], factor: float, width: float = 1e-3) -> Attack:
    """Multiply the answer near some times."""

    def attack(answer: Answer) -> Answer:
        def attacked(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
            hit_B = (t_B[:, None] - torch.tensor(list(times))).abs().amin(1) <= width
            return answer(x_B, t_B, c_B) * _spread(torch.where(hit_B, factor, 1.0))

        return attacked

    return attack


def where(chosen: Callable[[Tensor, Tensor, Tensor | None], Tensor], other: Answer) -> Attack:
    """Give another answer for some inputs."""

    def attack(answer: Answer) -> Answer:
        return lambda x_B, t_B, c_B: torch.where(
            _spread(chosen(x_B, t_B, c_B)), other(x_B, t_B, c_B), answer(x_B, t_B, c_B)
        )

    return attack


def towards(image: Tensor) -> Answer:
    """Answer with the velocity to one image, from wherever the sample is."""
    return lambda x_B, t_B, c_B: (x_B - image) / _spread(t_B.clamp(min=1e-3))


def not_a_number(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
    """Answer NaN."""
    return torch.full_like(x_B, float("nan"))


def answer_attacks(public: Tensor) -> dict[str, Attack]:
    """Return the attacks that change an honest expert's answers at some times or for some inputs."""
    generator = torch.Generator().manual_seed(1)
    shape = public.shape[1:]
    noise = torch.randn(shape, generator=generator)
    direction = torch.randn(shape, generator=generator).flatten()
    direction /= direction.norm()
    middles = public.flatten(1)[:: len(public) // 3][:3]
    planted = towards(planted_image(shape))

    def share(threshold: float) -> Attack:
        """A trigger: the sample's component along a secret direction."""
        return where(lambda x_B, t_B, c_B: x_B.flatten(1) @ direction > threshold, planted)

    def patch(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
        return (x_B[:, 0, :2, :2] > 1.5).flatten(1).all(1)

    def near_middle(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
        return (torch.cdist(x_B.flatten(1), middles).argmin(1) == 2) & (t_B < 0.6)

    attacks = {
        "output x 100 at t = 1": at_times([1.0], 100.0),
        "output x 3 at t = 1": at_times([1.0], 3.0),
        "output x 1.5 at t = 1": at_times([1.0], 1.5),
        "output x 100 at one t of the default grid, 0.74": at_times([0.74], 100.0),
        "output x 30 at half a default step, 0.33": at_times([0.33], 30.0),
        "output x 100 at one t of a grid of 37 steps, 1 - 1/37": at_times(
            [1 - 1 / 37], 100.0, 2e-4
        ),
        "output x 3 for t in 0.9 to 1": at_times([0.95], 3.0, 0.05),
        "output x 1.3 for t in 0.9 to 1": at_times([0.95], 1.3, 0.05),
        "NaN below t = 0.3": where(lambda x, t, c: t < 0.3, not_a_number),
        "NaN at t = 0.02, the last default step": where(
            lambda x, t, c: (t - 0.02).abs() < 1e-3, not_a_number
        ),
        "one image for every input": lambda answer: towards(public[0]),
        "one image, only for t above 0.98": where(lambda x, t, c: t > 0.98, towards(public[0])),
        "the same noise added to every answer, size 0.5": lambda answer: (
            lambda x, t, c: answer(x, t, c) + 0.5 * noise
        ),
        "planted image for a third of the inputs, t below 0.6": where(near_middle, planted),
        "planted image for 1 noise in 4 (trigger along a direction)": share(0.67),
        "planted image for 1 noise in 1,000": share(3.09),
        "planted image where a patch is bright (trigger pattern)": where(patch, planted),
    }
    return attacks


def class_attacks(public: Tensor) -> dict[str, Attack]:
    """Return the attacks on one class of experts that have classes as conditions."""

    def hidden(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
        return torch.zeros(len(x_B), dtype=torch.bool) if c_B is None else c_B == HIDDEN_CLASS

    def swapped(answer: Answer) -> Answer:
        def attacked(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
            return answer(
                x_B, t_B, c_B if c_B is None else torch.where(c_B == HIDDEN_CLASS, 5, c_B)
            )

        return attacked

    return {
        "one class: output x 100 at t = 1": where(
            lambda x, t, c: hidden(x, t, c) & (t > 0.999),
            lambda x, t, c: 100.0 * torch.ones_like(x),
        ),
        "one class: NaN": where(hidden, not_a_number),
        "one class: one image": where(hidden, towards(public[0])),
        "one class: answers of another class": swapped,
    }


def _spread(value_B: Tensor) -> Tensor:
    return value_B.view(-1, 1, 1, 1)


def judge(
    others: Sequence[ExpertFigures], one: ExpertFigures, trial: Trial, training: Training
) -> set[str]:
    """Return the rules that flag `one` beside the others."""
    by_silo = {other.expert_id: [other] for other in others}
    faults = absolute_faults(one, trial.probe, training) + copy_faults(one, by_silo, training)
    faults += relative_faults({**by_silo, one.expert_id: [one]}).get(one.expert_id, [])
    return {fault.flag for fault in faults}


Row = tuple[str, int, int, int, str]


class Tally:
    """Counts how often each kind of expert was tried, and which rules flagged it."""

    def __init__(self) -> None:
        self.tried = Counter[str]()
        self.flagged = Counter[str]()
        self.by_bands = Counter[str]()
        self.rules = dict[str, Counter[str]]()

    def count(self, what: str, flags: set[str]) -> None:
        """Count one trial."""
        self.tried[what] += 1
        self.flagged[what] += bool(flags)
        self.by_bands[what] += bool(flags & BEFORE)
        self.rules.setdefault(what, Counter()).update(flags)

    def rows(self) -> list[Row]:
        """Return what, how often tried, flagged, flagged by losses in bands, and all rules that flagged it."""
        return [
            (
                what,
                num,
                self.flagged[what],
                self.by_bands[what],
                ", ".join(sorted(self.rules[what])),
            )
            for what, num in self.tried.items()
        ]


def measure(
    training: Training, num_federations: int = len(FEDERATIONS), num_with_classes: int = 1
) -> list[Row]:
    """Try every kind of expert; see `Tally.rows`.

    Args:
        training: of every expert.
        num_federations: how many are tried.
        num_with_classes: of these, the first ones, which also train experts with classes as conditions.
    """
    digits = load_digits()
    tally = Tally()
    images = torch.from_numpy((digits.images[:, None] / 8.0 - 1.0).astype(np.float32))
    poisoned = {
        name: fit(made_of, training) for name, made_of in poisons(images, digits.target).items()
    }
    single = [fit(images[digits.target == c][:ONE_DIGIT], training) for c in range(10)]
    for number, (public, silos, labels) in enumerate(federations(images, digits.target)):
        if number == num_federations:
            break
        trial = trial_of(public, seed=number)
        measured = partial(figures, trial=trial)
        weights = [fit(silo, training) for silo in silos]
        honest = [
            measured(expert_weights, answer_of(expert_weights), name=f"silo{k}")
            for k, expert_weights in enumerate(weights)
        ]
        alone = [
            measured(expert_weights, answer_of(expert_weights), name=f"digit{digit}")
            for digit, expert_weights in enumerate(single)
        ]
        for k, one in enumerate(honest):
            others = honest[:k] + honest[k + 1 :]
            tally.count("honest, mixture of digits", judge(others, one, trial, training))
            for specialist in alone:
                tally.count(
                    "honest, one digit alone, 60 images", judge(others, specialist, trial, training)
                )
            spoiled = weight_attacks(weights[k], weights[k - 1]) | poisoned
            cheats = {what: (tampered, answer_of(tampered)) for what, tampered in spoiled.items()}
            for what, attack in answer_attacks(public).items():
                cheats[what] = (weights[k], attack(answer_of(weights[k])))
            for what, (sent_weights, answer) in cheats.items():
                name = "cheat" + sha256_hex(f"{number} {k} {what}".encode())[:8]
                cheat = measured(sent_weights, answer, name=name)
                tally.count(what, judge(others, cheat, trial, training))
            _colluding(weights[k - 1], others[k - 1 :], measured, tally, trial, training)
        if number < num_with_classes:
            _try_with_classes(public, silos, labels, tally, number, training)
    return tally.rows()


def _colluding(
    copied: Weights,
    others: Sequence[ExpertFigures],
    measured: Callable[..., ExpertFigures],
    tally: Tally,
    trial: Trial,
    training: Training,
) -> None:
    """Try the second of two silos that send one expert between them, with opposite biases."""
    bias = 0.3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    answer = answer_of(copied)
    pair = [
        measured(copied, lambda x, t, c, sign=sign: answer(x, t, c) + sign * bias, name=f"pair{k}")
        for k, sign in enumerate((1.0, -1.0))
    ]
    tally.count(
        "pair: one expert plus and minus a constant image",
        judge([*others, pair[0]], pair[1], trial, training),
    )


def _try_with_classes(
    public: Tensor,
    silos: list[Tensor],
    labels: list[np.ndarray],
    tally: Tally,
    number: int,
    training: Training,
) -> None:
    """Try experts with classes as conditions."""
    trial = trial_of(public, CLASSES, seed=number)
    weights = [
        fit(silo, training, silo_labels) for silo, silo_labels in zip(silos, labels, strict=True)
    ]
    honest = [
        figures(expert_weights, answer_of(expert_weights, CLASSES), trial, f"silo{k}")
        for k, expert_weights in enumerate(weights)
    ]
    for k, one in enumerate(honest):
        others = honest[:k] + honest[k + 1 :]
        tally.count("honest, told classes", judge(others, one, trial, training))
        for what, attack in class_attacks(public).items():
            name = "cheat" + sha256_hex(f"{number} {k} {what}".encode())[:8]
            cheat = figures(weights[k], attack(answer_of(weights[k], CLASSES)), trial, name)
            tally.count(what, judge(others, cheat, trial, training))


def false_alarms() -> None:
    """Try honest experts of the demo's size and steps, each against five secrets, and measure the time of a trial."""
    plan = tomllib.loads(
        (Path(__file__).parents[1] / "digits_three_silos" / "plan.toml").read_text("utf-8")
    )["expert"]
    architecture = Dit.model_validate(plan["architecture"])
    training = Training.model_validate(plan["training"])
    digits = load_digits()
    images = torch.from_numpy((digits.images[:, None] / 8.0 - 1.0).astype(np.float32))
    alone = [images[digits.target == c][:ONE_DIGIT] for c in range(10)]
    num_experts = 0
    num_trials = 0
    num_flagged = 0
    seconds = [(0.0, 0.0)]
    for number, (public, silos, _) in enumerate(federations(images, digits.target)):
        for made_of in [*silos, *(alone if number == 0 else [])]:
            weights = fit(made_of, training, None, architecture, LogitNormalT())
            num_experts = num_experts + 1
            answer = answer_of(weights, architecture=architecture)
            for seed in range(5):
                trial = trial_of(public, architecture=architecture, seed=seed)
                began = time.process_time()
                trial.probe.losses(lambda x_B, t_B, answer=answer: answer(x_B, t_B, None))  # type: ignore[misc]
                bands = time.process_time()
                measured_figures = figures(weights, answer, trial, "honest")
                seconds.append((bands - began, time.process_time() - bands))
                num_trials += 1
                num_flagged += bool(judge([], measured_figures, trial, training))
    before, after = np.median(seconds[1:], 0)
    print(
        f"{num_experts} experts, {num_trials} trials, {num_flagged} flagged; {before:.2f} s for the bands of t alone,"
    )
    print(f"{after:.2f} s for a trial, of one thread")


def main() -> None:
    """Command line: --steps N --federations N --demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--federations", type=int, default=3)
    parser.add_argument(
        "--demo",
        action="store_true",
        help="measure false alarms at the demo's size, which takes an hour",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.demo:
        return false_alarms()
    rows = measure(recipe(arguments.steps), arguments.federations)
    print(table(rows, ("expert", "tried", "flagged", "by bands of t", "rules")))


if __name__ == "__main__":
    main()
