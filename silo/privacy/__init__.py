"""The ledger of a silo's privacy, and the statistics it pays for."""
