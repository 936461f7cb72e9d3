"""Fits what a plan makes public: encoder, latents, clusters and sketch."""
