"""A silo: trains the model that came on its images, as experts are trained; or sends its expert and statistics."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath
from ddm.errors import NumericalError
from ddm.models import build_expert
from ddm.planning.training import TrainingRecipe
from ddm.protocol.plan import LogitNormalT
from ddm.training.config import Engine
from ddm.training.loop import Trained
from ddm.training.loop import train as train_model
from examples.paper.federated.terms import Terms

_WARMUP = 10  # every round has a new optimizer

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Answer with the trained weights, in the last round with their average over its steps; or that they diverged."""
    folder, silo = _at(context)
    terms, number = Terms.read(folder), int(message.content["config"]["round"])
    images = torch.from_numpy(np.load(folder / f"silo{silo}.npy"))
    state: dict[str, Tensor] = dict(message.content["arrays"].to_torch_state_dict())
    mu = float(message.content["config"].get("proximal-mu", 0.0))
    diverged, flops = False, 0.0
    try:
        state, trained = learn(terms, silo, number, state, images, mu)
        flops = trained.flops
    except NumericalError:  # an answer all the same: Flower would only leave out a silo that fails
        diverged = True
    metrics = MetricRecord({"num-examples": len(images), "flops": flops, "diverged": float(diverged)})
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
    return Message(content, reply_to=message)


@app.query()  # type: ignore[untyped-decorator]
def collect(message: Message, context: Context) -> Message:
    """Answer with the files that this silo would submit."""
    folder, silo = _at(context)
    files = sorted(path for path in (folder / f"silo{silo}").rglob("*") if path.is_file())
    content = RecordDict({"files": ConfigRecord({path.name: path.read_bytes() for path in files})})
    return Message(content, reply_to=message)


def _at(context: Context) -> tuple[Path, int]:
    return Path(str(context.node_config["folder"])), int(context.node_config["silo"])


def learn(
    terms: Terms, silo: int, number: int, state: dict[str, Tensor], images: Tensor, mu: float
) -> tuple[dict[str, Tensor], Trained]:
    """Train one round with the library's own loop.

    Args:
        terms: of the run.
        silo: which.
        number: of the round, from 0 on.
        state: the weights that came.
        images: the silo's.
        mu: weight of the proximal term ``mu / 2 |w - w_0|^2``; its gradient is added to the loss's.
    """
    steps, last = terms.steps_of(number), number == terms.rounds - 1
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
            images,
            settings,
            LinearPath(),
            LogitNormalT(),
            checkpoint_dir=Path(checkpoints),
            on_progress=lambda progress: None,
            should_stop=lambda: False,
            engine=Engine(device=terms.device),
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
