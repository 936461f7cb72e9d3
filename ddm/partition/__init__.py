"""How data is divided: clustering against public centroids, and the cells of a partition."""
