"""Writes the services of a site: worker and courier as two users, or in two containers."""
