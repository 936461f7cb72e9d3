"""What both halves of a run know, and the files by which they and the runner tell each other how far it is."""

from math import cos, pi
from pathlib import Path
from typing import Literal

from ddm.protocol.architecture import Dit
from ddm.protocol.base import Model

ROUND = "round-{:04d}.safetensors"
LOSE = "lose"
LOST = "lost"
DONE = "done"
TERMS = "terms.json"
# why the server gave up, in words; or this one
FAILED = "failed"
DIVERGED = "diverged"


class FederatedTerms(Model):
    """How one model is averaged, or that experts are collected.

    Attributes:
        method: Flower's strategy; or that each silo sends its files once.
        num_silos: how many.
        network: of the model.
        shape: of an image.
        rounds: of averaging.
        num_steps: of a silo, in all rounds together.
        batch_size: images in a silo's step.
        learning_rate: of the first round; it falls along half a cosine, from round to round.
        mu: weight of FedProx's proximal term.
        seed: of weights and batches.
        lost_after: the round after which the last silo is killed.
        device: where silos train.
    """

    method: Literal["fedavg", "fedprox", "collect"]
    num_silos: int
    network: Dit
    shape: tuple[int, ...]
    rounds: int = 1
    num_steps: int = 1
    batch_size: int = 1
    learning_rate: float = 1.0
    mu: float = 0.0
    seed: int = 0
    lost_after: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"

    @classmethod
    def read(cls, folder: Path) -> "FederatedTerms":
        """Read what the runner wrote."""
        return cls.model_validate_json((folder / TERMS).read_bytes())

    def steps_of(self, number: int) -> int:
        """Return the steps of a round, from 0 on; they add up to all."""
        return (number + 1) * self.num_steps // self.rounds - number * self.num_steps // self.rounds

    def rate_of(self, number: int) -> float:
        """Return the learning rate of a round: that of a cosine in its middle."""
        return self.learning_rate * (1 + cos(pi * (number + 0.5) / self.rounds)) / 2

    def done(self, folder: Path) -> int:
        """Return how many rounds are done."""
        return next(
            (n for n in range(self.rounds) if not (folder / ROUND.format(n + 1)).exists()),
            self.rounds,
        )
