"""Flower's own FedAvg on weights that are made up, as large as an expert's."""
