"""Diffusion mathematics: probability paths, solvers, and the random streams of samples."""
