"""From signed bytes to objects: a plan's public files, a release, the ensemble in it."""
