"""Flower's own FedAvg on synthetic weights of an expert's size."""
