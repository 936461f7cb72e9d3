"""Writes the service of a federation: `aggregator run` as a user of its own."""
