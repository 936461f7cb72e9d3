"""The aggregator's side; resolved on its machine, where `aggregator` is installed."""

import aggregator.server_app

# A plain assignment: Flower looks for the name in this file's source before a run.
app = aggregator.server_app.app
