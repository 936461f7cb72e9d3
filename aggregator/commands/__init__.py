"""The operator's commands; `aggregator.cli` registers them."""
