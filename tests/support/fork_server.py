"""Real processes for tests: started from one fork server that has imported the slow parts once."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["silo.privacy.statistics"])
