"""Partitions data among experts: public centroids, clusters, and each silo's parts."""
