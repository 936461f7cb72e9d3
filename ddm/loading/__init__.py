"""Loads signed files into objects: a plan's public files, a release, the ensemble in it."""
