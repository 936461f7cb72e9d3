"""Publishes versions of the ensemble and copies them out."""
