"""Differential privacy: accounting, noise, and the cost of a plan."""
