"""Measures what an expert remembers: membership attacks, copies among its samples, and controls of both."""
