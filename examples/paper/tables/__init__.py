"""The paper's tables: `python -m examples.paper.run`."""
