"""Renders the pages of a release, and holds the templates of the aggregator's pages."""
