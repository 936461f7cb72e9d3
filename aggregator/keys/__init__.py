"""The federation's keys after its beginning: ceremonies, rotation, removal, and its TLS certificates."""
