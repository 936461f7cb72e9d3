"""The mathematics of diffusion: probability paths, solvers, and the random streams of samples."""
