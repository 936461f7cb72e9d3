"""How a sample travels through experts and a router: mixing, guidance, strategies, trajectories."""
