"""How many threads tests compute with: one, or as many as the variable ARCHIPELAGO_TEST_THREADS says."""

import os

THREADS = int(os.environ.get("ARCHIPELAGO_TEST_THREADS", "1"))
