"""The state of a samples router's training, and how checkpoints store it."""

import time
from copy import deepcopy

import torch
from torch import Tensor

from ddm.models.token_router import TokenRouter
from ddm.protocol.routers import SamplesSettings
from ddm.training.checkpoints import Checkpoints


class RouterTrainingState:
    """All that a later step of the training depends on, and the best weights so far.

    Args:
        net: the network, on the device where it is trained.
        settings: the plan's recipe.
        generator: draws batches, times and noise.
    """

    def __init__(
        self, net: TokenRouter, settings: SamplesSettings, generator: torch.Generator
    ) -> None:
        self.net = net
        self.generator = generator
        self.optimizer = torch.optim.AdamW(
            net.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.step = 0
        self._began_at = time.monotonic()
        # A training that goes on keeps the number of threads with which it began, which changes sums by rounding.
        self.threads = torch.get_num_threads()
        self.best_loss = float("inf")
        self.best_weights = deepcopy(net.state_dict())

    def keep_if_best(self, loss: float) -> None:
        """Keep the present weights if no others had such a low loss on the held-out images."""
        if loss < self.best_loss:
            self.best_loss = loss
            self.best_weights = deepcopy(self.net.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        tensors = {"generator": self.generator.get_state()}
        for name, value in self.net.state_dict().items():
            tensors[f"last/{name}"] = value
            tensors[f"best/{name}"] = self.best_weights[name]
        for name, weight in self.net.named_parameters():
            moments = self.optimizer.state.get(weight)
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}/{name}"] = (
                    moments[moment] if moments else torch.zeros_like(weight)
                )
        return tensors

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint; its loss is that of the best weights."""
        checkpoints.save(
            self.tensors(),
            step=self.step,
            loss=self.best_loss,
            seconds=time.monotonic() - self._began_at,
            threads=self.threads,
        )

    def restore(self, checkpoints: Checkpoints) -> None:
        """Continue from the last complete checkpoint, if there is one."""
        checkpoint = checkpoints.load(self.tensors())
        if checkpoint is None:
            return
        record, tensors = checkpoint
        self.step = record.step
        self._began_at -= record.seconds
        self.threads = record.threads
        self.best_loss = record.loss
        self.generator.set_state(tensors["generator"])
        self.net.load_state_dict({name: tensors[f"last/{name}"] for name in self.best_weights})
        for name, best in self.best_weights.items():
            best.copy_(tensors[f"best/{name}"])
        for name, weight in self.net.named_parameters():
            self.optimizer.state[weight] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": tensors[f"exp_avg/{name}"].to(weight.device),
                "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(weight.device),
            }
