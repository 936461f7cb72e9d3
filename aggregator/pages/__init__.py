"""The pages of a release that people read, and the templates of every page."""
