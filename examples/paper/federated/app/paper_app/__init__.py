"""Points at `examples.paper.federated`."""
