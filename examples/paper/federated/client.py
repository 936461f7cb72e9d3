"""A silo's app: hands the weights that come to the silo's trainer; or sends its expert and statistics."""

from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from examples.paper.federated.handing import ask

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Answer with the trained weights, in the last round with their average over its steps; or that they diverged."""
    folder, silo = _at(context)
    config = message.content["config"]
    weights = {name: array.numpy() for name, array in message.content["arrays"].items()}
    numbers = {"round": float(config["round"]), "mu": float(config.get("proximal-mu", 0.0))}
    learnt, report = ask(folder, silo, message.metadata.message_id, weights, numbers)
    arrays = ArrayRecord({name: Array(value) for name, value in learnt.items()})
    metrics = MetricRecord(
        {
            "num-examples": int(report["images"]),
            "flops": report["flops"],
            "diverged": report["diverged"],
        }
    )
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.query()  # type: ignore[untyped-decorator]
def collect(message: Message, context: Context) -> Message:
    """Answer with the files that this silo would submit."""
    folder, silo = _at(context)
    files = sorted(path for path in (folder / f"silo{silo}").rglob("*") if path.is_file())
    content = RecordDict({"files": ConfigRecord({path.name: path.read_bytes() for path in files})})
    return Message(content, reply_to=message)


def _at(context: Context) -> tuple[Path, int]:
    return Path(str(context.node_config["folder"])), int(context.node_config["silo"])
