"""Routers and attacks at a privacy budget: `python -m examples.paper.privacy`."""
