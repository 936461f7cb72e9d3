"""Routers, one family a file: the probability that a noised sample came from each expert."""
