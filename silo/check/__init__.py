"""Checks a site before and during a run: what is wrong, or soon will be, and what to do."""
