"""Finds a site's images in whatever files they are, reads each in a process with bounds, and reports what is there."""
