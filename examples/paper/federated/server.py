"""The server: Flower's own FedAvg or FedProx, round by round, each kept; or one message to every silo."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx

from ddm.io.tensors import load_tensors, save_tensors
from ddm.models import build_expert
from examples.paper.federated.flattening import WEIGHTS, flat, named
from examples.paper.federated.terms import DIVERGED, DONE, FAILED, LOSE, LOST, ROUND, FederatedTerms

_MAX_BYTES = 1 << 32
# a round is waited for twice as long as the longest before
_FIRST_S = 3600.0
_PATIENCE = 2.0
_SLACK_S = 10.0

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run what the terms say."""
    folder = Path(str(context.run_config["folder"]))
    terms = FederatedTerms.read(folder)
    wanted = terms.num_silos - (folder / LOST).exists()
    try:
        _until(lambda: len(list(grid.get_node_ids())) >= wanted)
        fault = (
            _collect(grid, folder, wanted)
            if terms.method == "collect"
            else _average(grid, folder, terms)
        )
    except Exception as error:  # else the runner would wait for ever
        fault = f"{type(error).__name__}: {error}"
    if fault:
        (folder / FAILED).write_text(fault)
    else:
        (folder / DONE).touch()


def _until(reached: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not reached():
        if time.monotonic() - started > _FIRST_S:
            raise TimeoutError(f"silos did not connect or end within {_FIRST_S:.0f} s")
        time.sleep(0.1)


def _average(grid: Grid, folder: Path, terms: FederatedTerms) -> str:
    """Average until all rounds are done; return what went wrong. A silo may be missing where it is lost, only there."""
    first = terms.done(folder)
    like = build_expert(terms.network, terms.shape, seed=terms.seed).state_dict()
    state = (
        load_tensors(folder / ROUND.format(first), None, max_bytes=_MAX_BYTES) if first else like
    )
    arrays = ArrayRecord({WEIGHTS: Array(flat(state).numpy())})
    longest = 0.0
    for number in range(first, terms.rounds):
        if number == terms.lost_after and not (folder / LOST).exists():
            (folder / LOSE).touch()
            _until((folder / LOST).exists)
        started = time.monotonic()
        timeout = _PATIENCE * longest + _SLACK_S if longest else _FIRST_S
        config = ConfigRecord({"round": number})
        result = _strategy(terms).start(
            grid, arrays, num_rounds=1, timeout=timeout, train_config=config
        )
        metrics = result.train_metrics_clientapp.get(1, MetricRecord({"silos": 0, "diverged": 0.0}))
        wanted = terms.num_silos - (terms.lost_after is not None and number >= terms.lost_after)
        if metrics["diverged"]:
            return DIVERGED
        if metrics["silos"] != wanted:
            return f"round {number + 1}: weights of {metrics['silos']} silos of {wanted} within {timeout:.0f} s"
        arrays = result.arrays
        if number != terms.lost_after:
            longest = max(longest, time.monotonic() - started)
        (folder / f"round-{number + 1:04d}.txt").write_text(
            f"{metrics['flops']} {metrics['silos']}\n"
        )
        save_tensors(
            folder / ROUND.format(number + 1),
            named(torch.from_numpy(arrays[WEIGHTS].numpy()), like),
        )
    return ""


def _strategy(terms: FederatedTerms) -> FedAvg:
    how = {
        "fraction_evaluate": 0.0,
        "min_train_nodes": 1,
        "min_available_nodes": 1,
        "train_metrics_aggr_fn": _sums,
    }
    return FedProx(proximal_mu=terms.mu, **how) if terms.method == "fedprox" else FedAvg(**how)


def _sums(contents: list[RecordDict], _: str) -> MetricRecord:
    """Add up the silos' operations."""
    silo_metrics = [content["metrics"] for content in contents]
    total = {name: float(sum(one[name] for one in silo_metrics)) for name in ("flops", "diverged")}
    return MetricRecord({**total, "silos": len(silo_metrics)})


def _collect(grid: Grid, folder: Path, wanted: int) -> str:
    """Send every silo the plan's files, and take what it answers with; return what went wrong."""
    bundle = {
        path.name: path.read_bytes()
        for path in sorted((folder / "bundle").rglob("*"))
        if path.is_file()
    }
    content = RecordDict({"bundle": ConfigRecord(bundle)})
    messages = [
        Message(content, message_type="query", dst_node_id=node) for node in grid.get_node_ids()
    ]
    replies = [
        reply
        for reply in grid.send_and_receive(messages, timeout=_FIRST_S)
        if not reply.has_error()
    ]
    if len(replies) != wanted:
        return f"files of {len(replies)} silos of {wanted} within {_FIRST_S:.0f} s"
    for number, reply in enumerate(replies):
        received = folder / "received" / str(number)
        received.mkdir(parents=True, exist_ok=True)
        for name, data in reply.content["files"].items():
            (received / Path(str(name)).name).write_bytes(data)
    return ""
