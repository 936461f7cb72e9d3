"""Keeps the federation's transparency log: appends, signs, and writes its public form."""
