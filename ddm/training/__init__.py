"""Trains experts: the loop, batches, optimiser state, checkpoints, and the processes that share the work."""
