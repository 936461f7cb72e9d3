"""Measures how often screening flags honest experts of other kinds: unet, mmdit with texts, LoRA, and in latents.

`python -m examples.screening.kinds` prints a table of docs/explanation/screening.md; about ten minutes of one thread.
Data, silos and recipe are those of measure.py beside it. Texts are made up: each digit has two, of random tokens. A
LoRA adapts an expert that was trained on the public images; latents are of an autoencoder that was. Silos of a
federation are judged beside each other, silos with one digit alone beside all of them, each against several secrets.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from aggregator.intake.drawn import Gallery, PublicSet
from aggregator.intake.screening import ExpertFigures, fresh_rms
from aggregator.intake.trial import Trial
from ddm.encoders import PcaEncoder
from ddm.encoders.autoencoder import AutoencoderKl, build_autoencoder
from ddm.models import build_expert
from ddm.models.adaptation import adapt, merged
from ddm.protocol.architecture import (
    Architecture,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)
from ddm.protocol.latent import AutoencoderSize
from ddm.protocol.learning import Adaptation, FullAdaptation, LoraAdaptation, Training
from ddm.system.console import table
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from examples.screening.measure import answer_of, federations, figures, judge, recipe, trial_of

SHAPE = (1, 8, 8)
NUM_SECRETS = 3
ALONE = (0, 1, 3, 8)
TEXTS = TextCondition(dim=16, max_tokens=4, drop=0.1)
LATENT = AutoencoderSize(
    channels=(16, 32), attention=(False, False), latent_channels=2, num_res_blocks=1, norm_groups=8
)
AUTOENCODER_STEPS = 600
AUTOENCODER_RATE = 2e-3
DIT = Dit(patch=2, hidden=32, depth=2, heads=2)


@dataclass(frozen=True)
class Kind:
    """What experts are.

    Attributes:
        architecture: their network.
        condition: what they take beside x and t.
        adaptation: of an expert that was trained on the public images, where it is not `full`.
        in_latents: whether they see latents.
        rate: the learning rate.
    """

    architecture: Architecture = DIT
    condition: Condition = NoCondition()
    adaptation: Adaptation = FullAdaptation()
    in_latents: bool = False
    rate: float = 0.004


KINDS = {
    "unet": Kind(
        Unet(
            channels=(16, 32),
            attention=(False, True),
            num_res_blocks=1,
            head_channels=8,
            norm_groups=8,
        )
    ),
    "mmdit, told texts": Kind(Mmdit(patch=2, hidden=32, depth=2, heads=2), TEXTS),
    "dit, LoRA of rank 4": Kind(adaptation=LoraAdaptation(rank=4, alpha=4.0)),
    "dit, in latents of 2 x 4 x 4": Kind(
        Dit(patch=1, hidden=32, depth=2, heads=2), in_latents=True
    ),
}


def fit(
    model: nn.Module, images: Tensor, training: Training, texts: Tensor | None
) -> Mapping[str, Tensor]:
    """Train one expert; return its averaged weights."""
    with tempfile.TemporaryDirectory() as folder:
        return train(
            model,
            Examples(images, texts, TEXTS.drop),
            training,
            TrainingObjective(),
            TrainingRun(Path(folder)),
        ).ema


def texts_of(digit_N: np.ndarray) -> Tensor:
    """One of two texts of each image's digit, shape (N, L, D)."""
    rng = np.random.default_rng(0)
    known = torch.from_numpy(
        rng.standard_normal((10, 2, TEXTS.max_tokens, TEXTS.dim), dtype=np.float32)
    )
    known[:, 1, 2:] = 0  # the second is shorter
    return known[torch.from_numpy(digit_N).long(), torch.arange(len(digit_N)) % 2]


def autoencoder(images: Tensor) -> AutoencoderKl:
    """Train an autoencoder on public images, as examples/autoencoder does."""
    net = build_autoencoder(LATENT, SHAPE, seed=0).train()
    optimizer = torch.optim.Adam(net.parameters(), AUTOENCODER_RATE)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(AUTOENCODER_STEPS):
            real_B = images[torch.randint(len(images), (64,), generator=generator)]
            fake_B, mean_B, std_B = net(real_B)
            divergence = 0.5 * (mean_B.square() + std_B.square() - 2 * std_B.log() - 1).mean()
            loss = (fake_B - real_B).abs().mean() + 1e-3 * divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    scale = float(AutoencoderKl(net, LATENT, SHAPE).encode(images).std())  # as a plan states it
    return AutoencoderKl(net, LATENT, SHAPE, scale)


def trials(kind: Kind, public: Tensor, latent: AutoencoderKl | None) -> Iterator[Trial]:
    """The trials of several secrets; those of latents look at features of decoded images."""
    for seed in range(NUM_SECRETS):
        if latent is None:
            yield trial_of(public, kind.condition, kind.architecture, seed)
            continue
        seen = latent.encode(public)
        encoder = PcaEncoder.fit(public[len(public) // 4 :], 32)
        trial = trial_of(seen, kind.condition, kind.architecture, seed)

        def encode(z_N: Tensor, encoder: PcaEncoder = encoder) -> Tensor:
            return encoder.encode(latent.decode(z_N))

        features = PublicSet(encoder.encode(public[:256]))
        yield replace(trial, gallery=Gallery(PublicSet(seen[:256].flatten(1)), features, encode))


def measure(kind: Kind, training: Training, num_federations: int) -> tuple[int, int, Counter[str]]:
    """Return how many experts were trained, how many trials flagged one of them of how many, and by which rules."""
    digits = load_digits()
    num_experts = 0
    num_trials = 0
    rules = Counter[str]()
    images = torch.from_numpy((digits.images[:, None] / 8.0 - 1.0).astype(np.float32))
    has_texts = isinstance(kind.condition, TextCondition)
    for number, (public, silos, labels) in enumerate(federations(images, digits.target)):
        if number == num_federations:
            break
        latent = autoencoder(public[len(public) // 4 :]) if kind.in_latents else None
        see: Callable[[Tensor], Tensor] = latent.encode if latent else lambda x: x
        start = Start(kind, training, see(public[len(public) // 4 :]))
        held = [*zip(silos, labels, strict=True)]
        held += [
            (images[digits.target == c][:60], np.full(60, c))
            for c in (ALONE if number == 0 else ())
        ]
        weights = []
        for mine, of in held:
            own = fit(start(), see(mine), training, texts_of(of) if has_texts else None)
            weights.append(merged(own, kind.adaptation))
        num_experts += len(weights)
        shape = tuple(see(public[:1]).shape[1:])
        answers = [
            answer_of(expert_weights, kind.condition, kind.architecture, shape)
            for expert_weights in weights
        ]
        base = {name: _rms(value) for name, value in (start.weights or {}).items()}
        for trial in trials(kind, public, latent):
            figures_of_experts = [
                _grown(
                    figures(each, answer, trial, f"silo{k}"),
                    each,
                    base,
                    has_unit_weights=kind.architecture.has_unit_weights,
                )
                for k, (each, answer) in enumerate(zip(weights, answers, strict=True))
            ]
            for k, one in enumerate(figures_of_experts):
                others = [
                    other for j, other in enumerate(figures_of_experts[: len(silos)]) if j != k
                ]
                flags = judge(others, one, trial, training)
                num_trials += 1
                rules.update(flags or {"none"})
    return num_experts, num_trials, rules


class Start:
    """Builds what each silo trains: fresh weights, or the public expert with its adaptation."""

    def __init__(self, kind: Kind, training: Training, public: Tensor) -> None:
        self.kind = kind
        self.shape = tuple(public.shape[1:])
        self.weights: Mapping[str, Tensor] | None = None
        if isinstance(kind.adaptation, LoraAdaptation):
            self.weights = fit(self._fresh(), public, training, None)

    def __call__(self) -> nn.Module:
        """Return the model of one silo."""
        model = self._fresh()
        if self.weights:
            model.load_state_dict(dict(self.weights))
        return adapt(model, self.kind.adaptation, seed=0)

    def _fresh(self) -> nn.Module:
        return build_expert(
            self.kind.architecture, self.shape, condition=self.kind.condition, seed=0
        )


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


def _grown(
    found: ExpertFigures,
    weights: Mapping[str, Tensor],
    base: Mapping[str, float],
    *,
    has_unit_weights: bool,
) -> ExpertFigures:
    """Compare weights with fresh ones, and with those that training started from, as intake does."""
    before = {
        name: max(fresh_rms(value.shape, has_unit_weights=has_unit_weights), base.get(name, 0.0))
        for name, value in weights.items()
    }
    excess = {name: _rms(value) - before[name] for name, value in weights.items()}
    largest = max(excess, key=lambda name: excess[name])
    return found.model_copy(update={"excess_rms": excess[largest], "excess_tensor": largest})


def main() -> None:
    """Command line: --steps N --federations N --kind NAME."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--federations", type=int, default=2)
    parser.add_argument(
        "--kind",
        choices=[*KINDS],
        action="append",
        help="kind of expert to measure; may be repeated; default: all",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.kind or KINDS:
        kind = KINDS[name]
        plain = recipe(arguments.steps)
        training = plain.model_copy(update={"learning_rate": kind.rate})
        num_experts, num_trials, rules = measure(kind, training, arguments.federations)
        flagged = num_trials - rules.pop("none", 0)
        rows.append(
            (name, f"{num_experts}", f"{num_trials}", f"{flagged}", ", ".join(sorted(rules)))
        )
        print(table(rows, ("honest experts", "trained", "trials", "flagged", "rules")), flush=True)


if __name__ == "__main__":
    main()
