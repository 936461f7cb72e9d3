"""Draws samples with experts and a router: mixing, guidance, strategies, trajectories."""
