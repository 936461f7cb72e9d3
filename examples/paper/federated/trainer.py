"""A silo's trainer: trains the weights that its app hands over on its images, as experts are trained.

Flower starts a process for every message; this one stays, so that torch and the images are loaded once.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddm.errors import NumericalError
from ddm.models import build_expert
from ddm.planning.training import TrainingRecipe
from ddm.protocol.learning import LogitNormalT
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun
from ddm.training.loop import train as train_model
from ddm.training.objective import TrainingObjective
from examples.paper.federated.flattening import WEIGHTS, flat, named
from examples.paper.federated.handing import ANSWERED, ASKED, hand, handed, trainer_folder
from examples.paper.federated.terms import FederatedTerms

_WARMUP = 10  # every round has a new optimizer
_POLL_S = 0.05


def main() -> None:
    """Answer whatever is asked, until this process is ended."""
    folder = Path(sys.argv[1])
    silo = int(sys.argv[2])
    terms = FederatedTerms.read(folder)
    own = trainer_folder(folder, silo)
    images = torch.from_numpy(np.load(folder / f"silo{silo}.npy"))
    like = build_expert(terms.network, terms.shape, seed=terms.seed).state_dict()
    while True:
        for request in own.glob(f"{ASKED}*.npz"):
            weights, numbers = handed(request)
            state = named(torch.from_numpy(weights[WEIGHTS]), like)
            answer = own / request.name.replace(ASKED, ANSWERED)
            try:
                state, trained = learn(
                    terms, silo, int(numbers["round"]), state, images, numbers["mu"]
                )
            # an answer all the same: Flower would only leave out a silo that fails
            except NumericalError:
                hand(answer, weights, {"images": len(images), "flops": 0.0, "diverged": 1.0})
            else:
                learnt = flat({name: state[name] for name in like}).numpy()
                hand(
                    answer,
                    {WEIGHTS: learnt},
                    {"images": len(images), "flops": trained.flops, "diverged": 0.0},
                )
            request.unlink()
        time.sleep(_POLL_S)


def learn(
    terms: FederatedTerms,
    silo: int,
    number: int,
    state: dict[str, Tensor],
    images: Tensor,
    mu: float,
) -> tuple[dict[str, Tensor], FinishedTraining]:
    """Train one round with the library's own loop.

    Args:
        terms: of the run.
        silo: which.
        number: of the round, from 0 on.
        state: the weights that came.
        images: the silo's.
        mu: weight of the proximal term ``mu / 2 |w - w_0|^2``; its gradient is added to the loss's.
    """
    steps = terms.steps_of(number)
    last = number == terms.rounds - 1
    model = build_expert(terms.network, terms.shape, seed=terms.seed)
    model.load_state_dict(state)
    if mu:
        pull(model, mu)
    settings = TrainingRecipe(
        num_steps=steps,
        batch_size=terms.batch_size,
        learning_rate=terms.rate_of(number),
        schedule="constant",
        warmup_steps=min(_WARMUP, steps // 2),
        seed=(terms.seed * 1_000_003 + number) * 1_003 + silo,
    ).plain(terms.network)
    with tempfile.TemporaryDirectory() as checkpoints:
        trained = train_model(
            model,
            Examples(images),
            settings,
            TrainingObjective(t_distribution=LogitNormalT()),
            TrainingRun(Path(checkpoints), engine=Engine(device=terms.device)),
        )
    newest = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return (trained.ema if last else newest), trained


def pull(model: nn.Module, mu: float) -> None:
    """Add the gradient of the proximal term to that of every weight, as often as one is computed."""
    for weight in model.parameters():
        weight.register_hook(_towards(weight, weight.detach().clone(), mu))  # type: ignore[no-untyped-call]


def _towards(weight: Tensor, origin: Tensor, mu: float) -> Any:
    def pulled(gradient: Tensor) -> Tensor:
        return gradient + mu * (weight.detach() - origin.to(weight))

    return pulled


if __name__ == "__main__":
    main()
