"""The statistics that a silo draws under differential privacy, each kind in a module of its name."""
