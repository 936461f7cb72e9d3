"""Writes the files by which a machine runs programs of ours as services: systemd units, containers, and their users."""
