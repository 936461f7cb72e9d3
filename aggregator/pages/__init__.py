"""Renders the pages of a release, and holds the templates of every page."""
