"""Routers: models of which expert's data a noised sample came from, one family per file."""
