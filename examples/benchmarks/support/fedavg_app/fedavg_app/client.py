"""A client that returns changed weights without training."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Answer with the weights that came and a little noise."""
    generator = np.random.default_rng()
    arrays = [
        a + generator.normal(0, 1e-3, a.shape).astype(a.dtype)
        for a in message.content["arrays"].to_numpy_ndarrays()
    ]
    content = RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content, reply_to=message)
