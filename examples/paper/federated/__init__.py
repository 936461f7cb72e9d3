"""Federated averaging of one model through Flower, beside which the paper's table 8 sets the one-shot ensemble."""
