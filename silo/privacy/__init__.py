"""The ledger of a silo's privacy, the statistics it pays for, and the leak audit."""
