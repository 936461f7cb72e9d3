"""Distils an ensemble into one dense student: training data, training, and the student's files."""
