"""The federation's keys: stored, ceremonies, rotation, removal, and its TLS certificates."""
