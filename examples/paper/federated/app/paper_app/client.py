"""The silos' half."""

import examples.paper.federated.client

app = examples.paper.federated.client.app
