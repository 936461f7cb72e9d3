"""The server's half."""

import examples.paper.federated.server

app = examples.paper.federated.server.app
