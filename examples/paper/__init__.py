"""The experiments of the paper, each a command: `python -m examples.paper.NAME`."""
