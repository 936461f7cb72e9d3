"""The documents that cross a trust boundary: frozen, strict, bounded. Imports neither torch nor flwr."""
