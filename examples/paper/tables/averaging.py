"""Averages one model over silos through Flower, and counts what an ensemble of the same silos sends once."""

import shutil
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import Tensor

from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.io.tensors import load_tensors, save_tensors
from ddm.islands.router import exact_counts
from ddm.models import build_expert
from ddm.planning.training import TrainingRecipe
from examples.paper.federated.flattening import WEIGHTS as FLAT_WEIGHTS
from examples.paper.federated.flattening import flat, named
from examples.paper.federated.running import COUNTED, TransferCounts, run
from examples.paper.federated.terms import ROUND, FederatedTerms
from examples.paper.federated.trainer import learn
from examples.paper.tables.ensembles import islands_of
from examples.paper.tables.models import RECORD, WEIGHTS, Made, Weights, Workshop
from examples.paper.tables.results import Cost, Figure, commit
from examples.paper.tables.sharing import alone
from examples.paper.tables.sources import Experts, Federated

_MAX_BYTES = 1 << 32


def averaged_in_process(
    shop: Workshop,
    source: Federated,
    rate: float,
    seed: int,
    name: str,
    start: Weights | None = None,
) -> Made:
    """Train one model as `averaged` does, silo after silo in this process, by Flower's mean but not its messages.

    Args:
        shop: where.
        source: which.
        rate: learning rate of a silo's first round.
        seed: of weights, batches and silos.
        name: of its folder.
        start: the weights of the first round; None for random ones.
    """
    folder = shop.out / name
    if (folder / RECORD).exists():
        return shop.opened(name)
    terms = _terms(shop, source, shop.dense_training(source.budget, rate, seed), rate)
    silo_N = shop.world.silos(source.num, seed, source.concentration)
    silos = [shop.world.train.images[silo_N == silo] for silo in range(source.num)]
    state = start or build_expert(terms.network, terms.shape, seed=terms.seed).state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    began = monotonic()
    with shop.clock.progress(f"{name}: rounds of {source.method}") as step:
        state, flops = rounds_in_process(terms, silos, state, lambda done: step(done, terms.rounds))
    save_tensors(folder / WEIGHTS, state)
    cost = Cost(
        steps=terms.num_steps,
        batch_size=terms.batch_size,
        learning_rate=rate,
        flops=flops,
        router_flops=0.0,
        seconds=monotonic() - began,
        commit=commit(),
    )
    write_atomic(folder / RECORD, cost.model_dump_json(indent=1).encode())
    return shop.opened(name)


def rounds_in_process(
    terms: FederatedTerms,
    silos: Sequence[Tensor],
    state: Weights,
    on_round: Callable[[int], object],
) -> tuple[dict[str, Tensor], float]:
    """Average over silos for all rounds; return the weights and the operations.

    Args:
        terms: of the run.
        silos: the images of each, shape (N, ...).
        state: the weights of the first round.
        on_round: called with the number of rounds done.
    """
    current = dict(state)
    flops = 0.0
    for number in range(terms.rounds):
        answers = []
        for silo, images in enumerate(silos):
            learnt, trained = learn(terms, silo, number, current, images, terms.mu)
            vector_D = flat({name: learnt[name] for name in current}).numpy()
            arrays = ArrayRecord({FLAT_WEIGHTS: Array(vector_D)})
            metrics = MetricRecord({"num-examples": len(images)})
            answers.append(RecordDict({"arrays": arrays, "metrics": metrics}))
            flops += trained.flops
        mean = aggregate_arrayrecords(answers, "num-examples")[FLAT_WEIGHTS].numpy()
        current = named(torch.from_numpy(mean), current)
        on_round(number + 1)
    return current, flops


def averaged(shop: Workshop, source: Federated, rate: float, seed: int, name: str) -> Made:
    """Train one model by Flower's strategy, for as many operations as an ensemble and its router take.

    Args:
        shop: where.
        source: which.
        rate: learning rate of a silo's first round.
        seed: of weights, batches and silos.
        name: of its folder.

    Raises:
        SetupError: the source starts from another model, whose weights do not travel through Flower here.
    """
    if source.start is not None:
        raise SetupError(
            "federated averaging through Flower",
            expected="random weights in the first round",
            got="a model to start from",
            remedy="Average in this process, with in_process=True, or leave `start` out.",
        )
    folder = shop.out / name
    recipe = shop.dense_training(source.budget, rate, seed)
    terms = _terms(shop, source, recipe, rate)
    if not (folder / RECORD).exists():
        folder.mkdir(parents=True, exist_ok=True)
        silo_N = shop.world.silos(source.num, seed, source.concentration)
        for silo in range(source.num):
            np.save(folder / f"silo{silo}.npy", shop.world.train.images[silo_N == silo].numpy())
        counted = _run(shop, folder, terms, f"{name}: rounds of {source.method} through Flower")
        lines = [
            (folder / f"round-{number + 1:04d}.txt").read_text().split()
            for number in range(terms.rounds)
        ]
        save_tensors(
            folder / WEIGHTS,
            load_tensors(folder / ROUND.format(terms.rounds), None, max_bytes=_MAX_BYTES),
        )
        cost = Cost(
            steps=terms.num_steps,
            batch_size=terms.batch_size,
            learning_rate=rate,
            flops=sum(float(flops) for flops, _ in lines),
            router_flops=0.0,
            seconds=counted.seconds,
            commit=commit(),
        )
        write_atomic(folder / RECORD, cost.model_dump_json(indent=1).encode())
        for used in (*folder.glob("silo*.npy"), *folder.glob("round-*.safetensors")):
            used.unlink()
    return shop.opened(name)


def _terms(
    shop: Workshop, source: Federated, recipe: TrainingRecipe, rate: float
) -> FederatedTerms:
    batch = max(1, recipe.batch_size // source.num)
    rounds = min(source.rounds, recipe.num_steps)
    return FederatedTerms(
        method=source.method,
        num_silos=source.num,
        network=shop.preset.network,
        shape=shop.world.data.shape,
        rounds=rounds,
        num_steps=ceil(recipe.num_steps * recipe.batch_size / (batch * source.num)),
        batch_size=batch,
        learning_rate=rate,
        mu=source.mu,
        seed=recipe.seed,
        lost_after=rounds // 2 if source.lost else None,
        device="cuda" if shop.device.type == "cuda" else "cpu",
    )


def _run(shop: Workshop, folder: Path, terms: FederatedTerms, label: str) -> TransferCounts:
    with shop.clock.progress(label) as step:
        return run(folder, terms, lambda: step(terms.done(folder), terms.rounds))


def wire(shop: Workshop, source: Experts | Federated, name: str) -> dict[str, Figure]:
    """Return the bytes on the wire and the seconds of a model that is there.

    Of an ensemble, a message of Flower's takes the plan's files to every silo and brings back what it submits: expert,
    signed documents, and its counts for the router. Its seconds are those of training, one silo after the other, and of
    this message.
    """
    folder = shop.out / name
    if isinstance(source, Federated):
        counted = TransferCounts.model_validate_json((folder / COUNTED).read_bytes())
        seconds = counted.seconds
    else:
        with alone(shop.out, f"{name}-wire", wait=True):  # rows with the same ensemble share it
            counted = _collected(shop, source, name)
        seconds = Cost.model_validate_json((folder / RECORD).read_bytes()).seconds + counted.seconds
    totals = {
        "bytes_up": counted.up,
        "bytes_down": counted.down,
        "bytes": counted.up + counted.down,
        "wall_s": seconds,
    }
    return {key: Figure(value=float(value)) for key, value in totals.items()}


def _collected(shop: Workshop, source: Experts, name: str) -> TransferCounts:
    folder = shop.out / name / "wire"
    islands = islands_of(shop, name)
    release = shop.out / name / "release"
    terms = FederatedTerms(
        method="collect",
        num_silos=source.num,
        network=shop.preset.network,
        shape=shop.world.data.shape,
    )
    if not folder.exists():
        part = folder.with_name("wire.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(islands.bundle, part / "bundle")
        counts = exact_counts(islands)["counts"]
        for silo, island in enumerate(islands.plan.silos):
            own = part / f"silo{silo}"
            shutil.copytree(release / "targets" / islands.plan.plan_id / "silos" / island, own)
            for signed in (release / "metadata").glob(f"*{island}*"):
                shutil.copy(signed, own)
            save_tensors(own / "counts.safetensors", {"counts": counts[silo]})
        part.rename(folder)
    return _run(shop, folder, terms, f"{name}: collecting the experts through Flower")
