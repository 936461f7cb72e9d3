"""Training an expert: the loop, what a step sees, what changes from step to step, and the machine it runs on."""
