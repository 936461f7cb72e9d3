"""The federation's keys and TLS certificates: storage, signing ceremonies, rotation, removal of silos."""
