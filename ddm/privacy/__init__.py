"""Differential privacy: accounting, noise, and what a plan costs."""
