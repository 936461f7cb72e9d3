"""The programs of `aggregator run`: Flower's, nginx and intake, kept alive."""
