"""What the toolkit asks of the machine: processes, devices, the terminal, entry points."""
