"""The documents that cross a boundary: frozen, strict, bounded. No torch, no flwr; made to be read in one sitting."""
