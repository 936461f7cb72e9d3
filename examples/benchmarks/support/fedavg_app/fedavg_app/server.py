"""The server: runs the rounds that `fedavg.json` in the federation's folder describes, and records each there."""

import json
import os
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    fed = Path(os.environ["ARCHIPELAGO_FEDERATION"])
    settings = json.loads((fed / "fedavg.json").read_bytes())
    sizes = settings["tensor_sizes"]
    generator = np.random.default_rng(0)
    arrays = ArrayRecord([generator.normal(0, 0.02, size).astype(np.float32) for size in sizes])

    def note(number: int, averaged: ArrayRecord) -> MetricRecord:
        (fed / f"round{number}").touch()
        return MetricRecord({"round": number})

    num = settings["num_silos"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=num, min_available_nodes=num)
    strategy.start(grid, arrays, num_rounds=settings["num_rounds"], evaluate_fn=note)
    (fed / "fedavg.done").touch()
