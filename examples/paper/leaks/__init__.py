"""What experts remember of their silo: the leak audit against images, steps and differential privacy."""
