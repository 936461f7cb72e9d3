"""The Flower app: two names, both pointing at installed code."""
