"""What travels to and from a silo through the ServerApp; no torch, no Flower."""
